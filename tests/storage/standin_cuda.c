/* A libcuda.so.1 that knows no device, for machines without a GPU: kvikio then treats every address as host memory
   and moves it by its own POSIX path. Every call answers CUDA_ERROR_NOT_INITIALIZED but the version. */
#define ABSENT(name) int name(void) { return 3; }
#define ABSENT_V2(name) ABSENT(name) ABSENT(name##_v2)

ABSENT(cuInit)
ABSENT(cuMemHostAlloc)
ABSENT(cuMemFreeHost)
ABSENT_V2(cuMemHostRegister)
ABSENT(cuMemHostUnregister)
ABSENT_V2(cuMemcpyHtoDAsync)
ABSENT_V2(cuMemcpyDtoHAsync)
ABSENT(cuMemcpyAsync)
ABSENT_V2(cuMemcpyBatchAsync)
ABSENT(cuPointerGetAttribute)
ABSENT(cuPointerGetAttributes)
ABSENT_V2(cuCtxCreate)
ABSENT(cuCtxCreate_v3)
ABSENT(cuCtxCreate_v4)
ABSENT_V2(cuCtxDestroy)
ABSENT_V2(cuCtxPushCurrent)
ABSENT_V2(cuCtxPopCurrent)
ABSENT(cuCtxGetCurrent)
ABSENT_V2(cuCtxGetDevice)
ABSENT_V2(cuMemGetAddressRange)
ABSENT(cuGetErrorName)
ABSENT(cuGetErrorString)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetCount)
ABSENT(cuDeviceGetAttribute)
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT_V2(cuDevicePrimaryCtxRelease)
ABSENT(cuStreamSynchronize)
ABSENT(cuStreamCreate)
ABSENT_V2(cuStreamDestroy)
ABSENT(cuEventSynchronize)
ABSENT(cuEventCreate)
ABSENT_V2(cuEventDestroy)
ABSENT(cuEventRecord)
ABSENT(cuEventQuery)
ABSENT(cuLaunchHostFunc)

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}
