// MP_BOTH: for the host and, where a GPU's compiler reads it, for the device.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MP_BOTH __host__ __device__
#else
#define MP_BOTH
#endif
