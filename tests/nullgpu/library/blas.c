/* cuBLAS and cuBLASLt, without their headers, which Triton's wheel does not have: enumerations are int here. A product
 * is a line of the log and a node of a capture, with its sizes and types. Which of cuBLAS's kernels would run, and
 * whether it would refuse the layout, is not known. */
#include "nullgpu.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VERSION = 130100, EXECUTION_FAILED = 13 };

typedef struct {
  cudaStream_t stream;
  int math_mode, pointer_mode;
} Blas;

int cublasCreate_v2(void **blas) {
  *blas = calloc(1, sizeof(Blas));
  return 0;
}

int cublasSetStream_v2(Blas *blas, cudaStream_t stream) {
  blas->stream = stream;
  return 0;
}

int cublasGetMathMode(const Blas *blas, int *mode) {
  *mode = blas->math_mode;
  return 0;
}

int cublasSetMathMode(Blas *blas, int mode) {
  blas->math_mode = mode;
  return 0;
}

int cublasGetPointerMode_v2(const Blas *blas, int *mode) {
  *mode = blas->pointer_mode;
  return 0;
}

int cublasSetPointerMode_v2(Blas *blas, int mode) {
  blas->pointer_mode = mode;
  return 0;
}

size_t cublasLtGetVersion(void) { return VERSION; }

/* cudaDataType */
static const char *type_name(int type) {
  switch (type) {
  case 0: return "f32";
  case 1: return "f64";
  case 2: return "f16";
  case 3: return "i8";
  case 10: return "i32";
  case 14: return "bf16";
  case 28: return "e4m3";
  default: return "?";
  }
}

static const char OPERATIONS[] = "ntc"; /* as it is, transposed, conjugate transposed */

typedef struct {
  int64_t rows, columns, depth, batch;
} Product;

/* gemm: rows, columns, depth, batch. */
__attribute__((format(printf, 3, 4))) static int multiply(cudaStream_t stream, Product size, const char *format, ...) {
  char name[64];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(name, sizeof name, format, arguments);
  va_end(arguments);
  if (add_node(stream, 1)) return EXECUTION_FAILED;
  note(GEMM, name, size.rows, size.columns, size.depth, size.batch);
  return 0;
}

int cublasGemmEx(const Blas *blas, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                 int type_a, int stride_a, const void *b, int type_b, int stride_b, const void *beta, void *c,
                 int type_c, int stride_c, int compute, int algorithm) {
  return multiply(blas->stream, (Product){m, n, k, 1}, "gemm %s->%s %c%c compute %d math %d", type_name(type_a),
                  type_name(type_c), OPERATIONS[op_a], OPERATIONS[op_b], compute, blas->math_mode);
}

int cublasGemmStridedBatchedEx(const Blas *blas, int op_a, int op_b, int m, int n, int k, const void *alpha,
                               const void *a, int type_a, int stride_a, long long step_a, const void *b, int type_b,
                               int stride_b, long long step_b, const void *beta, void *c, int type_c, int stride_c,
                               long long step_c, int batch, int compute, int algorithm) {
  return multiply(blas->stream, (Product){m, n, k, batch}, "bgemm %s->%s %c%c compute %d math %d", type_name(type_a),
                  type_name(type_c), OPERATIONS[op_a], OPERATIONS[op_b], compute, blas->math_mode);
}

int cublasSgemm_v2(const Blas *blas, int op_a, int op_b, int m, int n, int k, ...) {
  return multiply(blas->stream, (Product){m, n, k, 1}, "sgemm f32 %c%c math %d", OPERATIONS[op_a], OPERATIONS[op_b],
                  blas->math_mode);
}

int cublasSgemmStridedBatched(const Blas *blas, int op_a, int op_b, int m, int n, int k, const float *alpha,
                              const float *a, int stride_a, long long step_a, const float *b, int stride_b,
                              long long step_b, const float *beta, float *c, int stride_c, long long step_c,
                              int batch) {
  return multiply(blas->stream, (Product){m, n, k, batch}, "sbgemm f32 %c%c math %d", OPERATIONS[op_a],
                  OPERATIONS[op_b], blas->math_mode);
}

int cublasSgemmEx(const Blas *blas, int op_a, int op_b, int m, int n, int k, ...) {
  return multiply(blas->stream, (Product){m, n, k, 1}, "sgemmEx");
}

int cublasDgemm_v2(const Blas *blas, int op_a, int op_b, int m, int n, int k, ...) {
  return multiply(blas->stream, (Product){m, n, k, 1}, "dgemm f64");
}

int cublasDgemmStridedBatched(const Blas *blas, int op_a, int op_b, int m, int n, int k, ...) {
  return multiply(blas->stream, (Product){m, n, k, -1}, "dbgemm f64");
}

int cublasSgemv_v2(const Blas *blas, int op, int m, int n, ...) {
  return multiply(blas->stream, (Product){m, n, 1, 1}, "sgemv f32");
}

int cublasSdot_v2(const Blas *blas, int n, ...) { return multiply(blas->stream, (Product){n, 1, 1, 1}, "sdot f32"); }
int cublasDotEx(const Blas *blas, int n, ...) { return multiply(blas->stream, (Product){n, 1, 1, 1}, "dotEx"); }

/* What stubs.c lists as computing: only the name is kept. */
int count_computation(const char *name) {
  note(GEMM, name, 0, 0, 0, 0);
  return 0;
}

/* ---- cuBLASLt ---- */

typedef struct {
  int op_a, op_b, epilogue;
} Description;

typedef struct {
  int type, batch;
  uint64_t rows, columns;
} Layout;

int cublasLtMatmulDescCreate(void **description, int compute, int scale) {
  *description = calloc(1, sizeof(Description));
  return 0;
}

int cublasLtMatmulDescSetAttribute(Description *description, int attribute, const int *value, size_t size) {
  enum { OP_A = 3, OP_B = 4, EPILOGUE = 7 };
  if (attribute == OP_A) description->op_a = *value;
  if (attribute == OP_B) description->op_b = *value;
  if (attribute == EPILOGUE) description->epilogue = *value;
  return 0;
}

int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  Layout *made = malloc(sizeof *made);
  *made = (Layout){type, 1, rows, columns};
  *layout = made;
  return 0;
}

int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const int *value, size_t size) {
  enum { BATCH_COUNT = 5 };
  if (attribute == BATCH_COUNT) layout->batch = *value;
  return 0;
}

int cublasLtMatmulPreferenceCreate(void **preference) {
  *preference = malloc(1);
  return 0;
}

static int freed(void *thing) {
  free(thing);
  return 0;
}

int cublasLtMatmulDescDestroy(void *description) { return freed(description); }
int cublasLtMatrixLayoutDestroy(void *layout) { return freed(layout); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return freed(preference); }

/* One algorithm is found: a structure of 96 bytes in which 0 is success. */
int cublasLtMatmulAlgoGetHeuristic(void *blas, void *description, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *found, int *count) {
  memset(found, 0, 96);
  *count = 1;
  return 0;
}

int cublasLtMatmul(void *blas, const Description *description, const void *alpha, const void *a, const Layout *layout_a,
                   const void *b, const Layout *layout_b, const void *beta, const void *c, const Layout *layout_c,
                   void *d, const Layout *layout_d, const void *algorithm, void *workspace, size_t workspace_size,
                   cudaStream_t stream) {
  uint64_t depth = description->op_a ? layout_a->rows : layout_a->columns;
  return multiply(stream, (Product){layout_d->rows, layout_d->columns, depth, layout_d->batch},
                  "ltmm %s->%s %c%c epilogue %d", type_name(layout_a->type), type_name(layout_d->type),
                  OPERATIONS[description->op_a], OPERATIONS[description->op_b], description->epilogue);
}
