/* The functions of the OpenMP runtime that gcc calls for fused.c, on plain pthreads. ThreadSanitizer knows pthreads; it
   does not know gcc's own runtime, libgomp, whose locks it would not see. A region may have one `single`. */

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct {
  void (*body)(void *);
  void *data;
  int size, single_taken;
  pthread_barrier_t barrier;
} Team;

typedef struct {
  Team *team;
  int number;
} Member;

static _Thread_local Member self = {NULL, 0};

int omp_get_num_threads(void) { return self.team ? self.team->size : 1; }
int omp_get_thread_num(void) { return self.number; }
void GOMP_barrier(void) { pthread_barrier_wait(&self.team->barrier); }
bool GOMP_single_start(void) { return !__atomic_exchange_n(&self.team->single_taken, 1, __ATOMIC_RELAXED); }

static void *run_member(void *member) {
  const Member outer = self;
  self = *(Member *)member;
  self.team->body(self.team->data);
  self = outer;
  return NULL;
}

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
  (void)flags;
  Team team = {.body = body, .data = data, .size = (int)threads};
  pthread_t *handles = malloc(threads * sizeof *handles);
  Member *members = malloc(threads * sizeof *members);
  if (!handles || !members || pthread_barrier_init(&team.barrier, NULL, threads)) abort();
  for (unsigned i = 0; i < threads; i++) members[i] = (Member){&team, (int)i};
  for (unsigned i = 1; i < threads; i++)
    if (pthread_create(&handles[i], NULL, run_member, &members[i])) abort();
  run_member(&members[0]);
  for (unsigned i = 1; i < threads; i++) pthread_join(handles[i], NULL);
  pthread_barrier_destroy(&team.barrier);
  free(handles);
  free(members);
}
