/* What torch's calls of the heap are timed by, and the bare calls that stitching memory is measured against. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ 22
#endif

typedef void* (*Allocate)(size_t bytes, int device, void* stream);
typedef void (*Free)(void* at, size_t bytes, int device, void* stream);

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Seconds of one allocation and its end, over `rounds` of them. Negative where one was refused. */
double allocate_and_free(Allocate allocate, Free release, size_t bytes, size_t rounds) {
  const double begin = now();
  for (size_t i = 0; i < rounds; ++i) {
    void* const at = allocate(bytes, 0, NULL);
    if (at == NULL) return -1;
    release(at, bytes, 0, NULL);
  }
  return (now() - begin) / (double)rounds;
}

/* Seconds of one allocation, given in *at. */
double allocate_once(Allocate allocate, size_t bytes, void** at) {
  const double begin = now();
  *at = allocate(bytes, 0, NULL);
  return now() - begin;
}

/* Seconds to unmap every second of 2 * `count` present pages of `bytes`, and to map them behind one range,
   present. Negative where a call was refused. */
double bare_stitch(size_t count, size_t bytes) {
  const int file = memfd_create("bare", MFD_CLOEXEC);
  if (file < 0) return -1;
  const size_t all = 2 * count * bytes;
  const int none = PROT_READ, reserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  const int access = PROT_READ | PROT_WRITE, shared = MAP_SHARED | MAP_FIXED;
  char* const from = mmap(NULL, all, none, reserved, -1, 0);
  char* const to = mmap(NULL, count * bytes, none, reserved, -1, 0);
  double seconds = -1;
  if (from != MAP_FAILED && to != MAP_FAILED && ftruncate(file, (off_t)all) == 0 &&
      mmap(from, all, access, shared, file, 0) != MAP_FAILED && madvise(from, all, MADV_POPULATE_READ) == 0) {
    int refused = 0;
    const double begin = now();
    for (size_t i = 0; i < count; ++i)
      refused |= mmap(from + 2 * i * bytes, bytes, none, reserved | MAP_FIXED, -1, 0) == MAP_FAILED;
    for (size_t i = 0; i < count; ++i)
      refused |= mmap(to + i * bytes, bytes, access, shared, file, (off_t)(2 * i * bytes)) == MAP_FAILED;
    for (size_t i = 0; i < count; ++i) refused |= madvise(to + i * bytes, bytes, MADV_POPULATE_READ) != 0;
    if (!refused) seconds = now() - begin;
  }
  if (from != MAP_FAILED) munmap(from, all);
  if (to != MAP_FAILED) munmap(to, count * bytes);
  close(file);
  return seconds;
}
