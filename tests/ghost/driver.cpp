// The part of the CUDA driver that torch asks before it uses the runtime.
extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  static int one;
  *context = &one;
  return 0;
}

}  // extern "C"
