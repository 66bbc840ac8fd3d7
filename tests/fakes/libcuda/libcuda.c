// SPDX-License-Identifier: Apache-2.0
// A driver without a GPU: it writes down what it is asked, a line a call, to the file that FAKE_CUDA names. A tensor map
// is the address it was last aimed at. A call named by FAKE_CUDA_FAILS fails.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *out(void) {
  static FILE *file = NULL;
  if (file == NULL)
    file = fopen(getenv("FAKE_CUDA"), "a");
  setvbuf(file, NULL, _IONBF, 0);
  return file;
}

static CUresult outcome(const char *call) {
  const char *fails = getenv("FAKE_CUDA_FAILS");
  return fails != NULL && strcmp(fails, call) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "?";
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *ones, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof(*map));
  memcpy(map, &address, sizeof(address));
  fprintf(out(), "encode type %d swizzle %d aligned %d", (int)type, (int)swizzle, (int)((size_t)map % 64 == 0));
  for (unsigned axis = 0; axis < rank; axis++)
    fprintf(out(), " %lu/%u%s%lu", sizes[axis], box[axis], axis + 1 < rank ? "*" : "", axis + 1 < rank ? strides[axis] : 0);
  fprintf(out(), "\n");
  return outcome("encode");
}

CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  memcpy(map, &address, sizeof(address));
  fprintf(out(), "aim %lu\n", (size_t)address);
  return outcome("aim");
}

CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
  unsigned long first = 0;
  unsigned number = 0;
  memcpy(&first, parameters[0], sizeof(first));
  memcpy(&number, parameters[1], sizeof(number));
  fprintf(out(), "launch %lu grid %u threads %u shared %u stream %lu: %lu %u\n", (size_t)function, x * y * z,
          threads * b * c, shared, (size_t)stream, first, number);
  return outcome("launch");
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **parameters, void **extra) {
  for (unsigned i = 0; i < how->numAttrs; i++)
    fprintf(out(), "attribute %d of %d\n", (int)how->attrs[i].id,
            how->attrs[i].value.programmaticStreamSerializationAllowed);
  return cuLaunchKernel(function, how->gridDimX, how->gridDimY, how->gridDimZ, how->blockDimX, how->blockDimY,
                        how->blockDimZ, how->sharedMemBytes, how->hStream, parameters, extra);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
  fprintf(out(), "copy %llu <- %llu, %zu bytes, stream %lu\n", target, source, bytes, (size_t)stream);
  return outcome("copy");
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  fprintf(out(), "write %llu = %u, stream %lu\n", address, value, (size_t)stream);
  return outcome("write");
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  fprintf(out(), "hold %lu until %llu %s %u\n", (size_t)stream, address, flags == CU_STREAM_WAIT_VALUE_GEQ ? ">=" : "?",
          value);
  return outcome("hold");
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  fprintf(out(), "record %lu on %lu\n", (size_t)event, (size_t)stream);
  return outcome("record");
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  fprintf(out(), "wait on %lu for %lu\n", (size_t)stream, (size_t)event);
  return outcome("wait");
}
