/* The log of what was asked of the card, for Python (by ctypes). A line of a dump has nanoseconds, kind, four numbers
 * and a name, between tabs; what the numbers are is said where note() is called. Complete while it is on, in the order
 * in which threads arrive. The times are those of the host. */
#include "nullgpu.h"
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
  uint64_t ns;
  Kind kind;
  const char *name;
  int64_t numbers[4];
} Entry;

static const char *const KINDS[] = {
    [LAUNCH] = "launch", [GEMM] = "gemm", [COPY] = "copy", [SYNC] = "sync", [MALLOC] = "malloc", [FREE] = "free",
    [GRAPH] = "graph",   [MARK] = "mark", [SET] = "set",   [HOST] = "host", [NCCL] = "nccl",     [MODULE] = "module",
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_on;
static Entry *entries;
static size_t entry_count, entry_room;

uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static int by_text(const void *a, const void *b) { return strcmp(a, b); }

/* The one copy of a name: some callers make it on their stack. */
static const char *kept(const char *name) {
  static void *names;
  char **found = tfind(name, &names, by_text);
  if (!found) found = tsearch(strdup(name), &names, by_text);
  return *found;
}

void note(Kind kind, const char *name, int64_t a, int64_t b, int64_t c, int64_t d) {
  if (!is_on) return;
  pthread_mutex_lock(&lock);
  if (entry_count == entry_room) {
    entry_room = entry_room ? 2 * entry_room : 1 << 16;
    entries = realloc(entries, entry_room * sizeof *entries);
  }
  entries[entry_count++] = (Entry){now_ns(), kind, kept(name), {a, b, c, d}};
  pthread_mutex_unlock(&lock);
}

void nullgpu_log(int on) {
  is_on = on;
  if (on) entry_count = 0;
}

void nullgpu_mark(const char *label) { note(MARK, label, 0, 0, 0, 0); }

int nullgpu_dump(const char *path) {
  FILE *file = fopen(path, "w");
  if (!file) return 1;
  for (size_t i = 0; i < entry_count; i++) {
    const Entry *entry = &entries[i];
    const int64_t *n = entry->numbers;
    fprintf(file, "%lu\t%s\t%ld\t%ld\t%ld\t%ld\t%s\n", entry->ns, KINDS[entry->kind], n[0], n[1], n[2], n[3],
            entry->name);
  }
  return fclose(file) != 0;
}
