// The library's own functions: version, target, text of an error.
#include "mp.h"

#ifndef MP_TARGET
#error "the build defines MP_TARGET, a string"
#endif

extern "C" int32_t mp_abi(void) { return MP_ABI; }
extern "C" const char* mp_target(void) { return MP_TARGET; }

extern "C" const char* mp_error(int32_t code) {
  switch (code) {
    case MP_OK: return "no error";
    case MP_BAD_DTYPE: return "dtype is none of float32, float16, bfloat16";
    case MP_BAD_SIZE: return "a size is out of range";
    default: return "unknown error";
  }
}
