/* NCCL: a collective succeeds at once, moves nothing and waits for no other rank, so a run that would hang on cards
 * does not hang here. Its calls are in the log. */
#include "nullgpu.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
  char bytes[128];
} Id;

typedef struct {
  int ranks, rank;
} Communicator;

int ncclGetVersion(int *version) {
  *version = 22907;
  return 0;
}

int ncclGetUniqueId(Id *id) {
  memset(id, 7, sizeof *id);
  return 0;
}

const char *ncclGetErrorString(int error) { return error ? "error of the null NCCL" : "no error"; }
const char *ncclGetLastError(void *communicator) { return "none"; }

static int join(void **communicator, int ranks, int rank) {
  Communicator *made = malloc(sizeof *made);
  *made = (Communicator){ranks, rank};
  *communicator = made;
  return 0;
}

int ncclCommInitRank(void **communicator, int ranks, Id id, int rank) { return join(communicator, ranks, rank); }

int ncclCommInitRankConfig(void **communicator, int ranks, Id id, int rank, void *config) {
  return join(communicator, ranks, rank);
}

int ncclCommInitRankScalable(void **communicator, int ranks, int rank, int id_count, Id *ids, void *config) {
  return join(communicator, ranks, rank);
}

int ncclCommSplit(void *communicator, int color, int key, void **part, void *config) {
  *part = communicator;
  return 0;
}

int ncclCommCount(const Communicator *communicator, int *ranks) {
  *ranks = communicator->ranks;
  return 0;
}

int ncclCommUserRank(const Communicator *communicator, int *rank) {
  *rank = communicator->rank;
  return 0;
}

int ncclCommGetAsyncError(void *communicator, int *error) {
  *error = 0;
  return 0;
}

/* nccl: elements. */
static int collect(const char *name, size_t count, cudaStream_t stream) {
  note(NCCL, name, count, 0, 0, 0);
  add_node(stream, 1);
  return 0;
}

#define COLLECTIVE(name, ...)                                                                                          \
  int name(__VA_ARGS__, void *communicator, cudaStream_t stream) { return collect(#name, count, stream); }

COLLECTIVE(ncclAllReduce, const void *from, void *to, size_t count, int type, int operation)
COLLECTIVE(ncclAllGather, const void *from, void *to, size_t count, int type)
COLLECTIVE(ncclReduceScatter, const void *from, void *to, size_t count, int type, int operation)
COLLECTIVE(ncclBroadcast, const void *from, void *to, size_t count, int type, int root)
COLLECTIVE(ncclBcast, void *both, size_t count, int type, int root)
COLLECTIVE(ncclReduce, const void *from, void *to, size_t count, int type, int operation, int root)
COLLECTIVE(ncclSend, const void *from, size_t count, int type, int peer)
COLLECTIVE(ncclRecv, void *to, size_t count, int type, int peer)
COLLECTIVE(ncclAlltoAll, const void *from, void *to, size_t count, int type)
