/* A libcuda.so.1 that has one H100 and starts nothing: it writes down what it is asked to launch. */
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  char name[256];
  int count;       /* parameters, as Python tells */
  int *sizes;      /* bytes of each */
} Function;

static char *written = NULL;
static size_t used = 0, room = 0;
static int writing = 0;

static void put(const void *data, size_t n) {
  if (used + n > room) {
    room = 2 * (used + n);
    written = realloc(written, room);
  }
  memcpy(written + used, data, n);
  used += n;
}

void pretended_parameters(CUfunction f, int count, const int *sizes) {
  Function *function = (Function *)f;
  function->count = count;
  function->sizes = malloc(count * sizeof(int));
  memcpy(function->sizes, sizes, count * sizeof(int));
}

void pretended_write(int on) { writing = on; used = 0; }
size_t pretended_used(void) { return used; }
const char *pretended_written(void) { return written; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int n) { *d = n; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 1 << 20; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "pretended"; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) { *c = 0; return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)1; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  switch (a) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *v = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *v = 0; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *v = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *v = 32; break;
  default: *v = 232448; /* shared memory of a block */
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  Function *function = calloc(1, sizeof(Function));
  strncpy(function->name, name, sizeof(function->name) - 1);
  *f = (CUfunction)function;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
  *(CUdeviceptr *)v = p;
  return CUDA_SUCCESS;
}

/* A map holds what it was made of. */
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *shape,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  cuuint64_t *words = (cuuint64_t *)map;
  memset(map, 0, sizeof(CUtensorMap));
  words[0] = (cuuint64_t)address;
  words[1] = type | (rank << 8) | (swizzle << 16) | ((cuuint64_t)fill << 24) | ((cuuint64_t)promotion << 28);
  for (cuuint32_t i = 0; i < rank; i++) {
    words[2 + i] = shape[i] ^ (cuuint64_t)box[i] << 32;
    if (i + 1 < rank) words[7 + i] = strides[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  if (!writing) return CUDA_SUCCESS;
  Function *function = (Function *)f;
  unsigned head[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->sharedMemBytes, c->numAttrs};
  put(function->name, sizeof(function->name));
  put(&f, sizeof(f));
  put(&c->hStream, sizeof(c->hStream));
  put(head, sizeof(head));
  put(&function->count, sizeof(int));
  for (int i = 0; i < function->count; i++) {
    put(&function->sizes[i], sizeof(int));
    put(params[i], function->sizes[i]);
  }
  return CUDA_SUCCESS;
}
