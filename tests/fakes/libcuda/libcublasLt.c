// SPDX-License-Identifier: Apache-2.0
// cublasLt without a GPU: it multiplies bf16 matrices in the host's memory as their layouts say, and writes down, a line
// each to the file that FAKE_CUDA names, what was preferred, what was multiplied and how much is still alive. A function
// named by FAKE_CUDA_FAILS returns a status; "algorithm" is a heuristic that knows none.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int transposed, epilogue;
  const uint16_t *bias;
} Description;

typedef struct {
  int type;
  uint64_t rows, columns;
  int64_t stride;
} Layout;

static int alive = 0;

static FILE *out(void) {
  static FILE *file = NULL;
  if (file == NULL)
    file = fopen(getenv("FAKE_CUDA"), "a");
  setvbuf(file, NULL, _IONBF, 0);
  return file;
}

static int fails(const char *what) {
  const char *name = getenv("FAKE_CUDA_FAILS");
  return name != NULL && strcmp(name, what) == 0;
}

static void *make(size_t bytes) {
  alive++;
  return calloc(1, bytes);
}

static int destroy(void *made) {
  free(made);
  fprintf(out(), "alive %d\n", --alive);
  return 0;
}

int cublasLtCreate(void **handle) {
  *handle = (void *)0x123456789abc;
  return fails("create") ? 1 : 0;
}

int cublasLtMatmulDescCreate(Description **made, int compute, int scale) {
  *made = make(sizeof(Description));
  return compute == 68 && scale == 0 ? 0 : 7;
}

int cublasLtMatmulDescSetAttribute(Description *made, int attribute, const void *value, size_t bytes) {
  if (attribute == 3 && bytes == 4)
    memcpy(&made->transposed, value, 4);
  else if (attribute == 7 && bytes == 4)
    memcpy(&made->epilogue, value, 4);
  else if (attribute == 8 && bytes == 8)
    memcpy(&made->bias, value, 8);
  else
    return 7;
  return fails("describe") ? 7 : 0;
}

int cublasLtMatmulDescDestroy(Description *made) { return destroy(made); }

int cublasLtMatrixLayoutCreate(Layout **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  *made = make(sizeof(Layout));
  **made = (Layout){type, rows, columns, stride};
  return stride >= (int64_t)rows ? 0 : 7;
}

int cublasLtMatrixLayoutDestroy(Layout *made) { return destroy(made); }

int cublasLtMatmulPreferenceCreate(void **made) {
  *made = make(8);
  return 0;
}

int cublasLtMatmulPreferenceSetAttribute(void *made, int attribute, const void *value, size_t bytes) {
  uint64_t number = 0;
  memcpy(&number, value, bytes);
  fprintf(out(), "prefer %d: %lu\n", attribute, number);
  return bytes == (attribute == 1 ? 8 : 4) ? 0 : 7;
}

int cublasLtMatmulPreferenceDestroy(void *made) { return destroy(made); }

int cublasLtMatmulAlgoGetHeuristic(void *handle, Description *made, Layout *a, Layout *b, Layout *c, Layout *d,
                                   void *preference, int wanted, void *results, int *count) {
  uint64_t algorithm[12] = {11, 22, 33, 44, 55, 66, 77, 88, 0, 0, 0, 0};
  memcpy(results, algorithm, sizeof(algorithm));
  *count = fails("algorithm") ? 0 : 1;
  return handle == (void *)0x123456789abc && wanted == 1 && c == d ? 0 : 7;
}

static float wide(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float found;
  memcpy(&found, &bits, 4);
  return found;
}

static uint16_t narrow(float value) { // to the nearest, to even where there are two
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

int cublasLtMatmul(void *handle, Description *made, const float *alpha, const uint16_t *a, Layout *of_a, const uint16_t *b,
                   Layout *of_b, const float *beta, const uint16_t *c, Layout *of_c, uint16_t *d, Layout *of_d,
                   const uint64_t *algorithm, void *scratch, size_t scratch_bytes, void *stream) {
  if (fails("multiply") || *alpha != 1 || *beta != 0 || c != d || algorithm[0] != 11 || algorithm[7] != 88)
    return 13;
  uint64_t depth = made->transposed ? of_a->rows : of_a->columns;
  fprintf(out(), "multiply %lu x %lu x %lu on %lu, scratch %zu\n", of_d->columns, of_d->rows, depth, (size_t)stream,
          scratch_bytes);
  for (uint64_t column = 0; column < of_d->columns; column++)
    for (uint64_t row = 0; row < of_d->rows; row++) {
      double sum = made->epilogue == 4 ? wide(made->bias[row]) : 0;
      for (uint64_t k = 0; k < depth; k++)
        sum += (double)wide(made->transposed ? a[row * of_a->stride + k] : a[k * of_a->stride + row]) *
               wide(b[column * of_b->stride + k]);
      d[column * of_d->stride + row] = narrow((float)sum);
    }
  return 0;
}
