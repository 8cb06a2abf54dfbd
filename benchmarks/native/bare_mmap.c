/* The bare loop that mapping pages is measured against: the same calls, at addresses and file offsets of the
   same kind, and nothing else. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Has the file's memory made and zeroed; false where that is refused. */
static int make_present(int file, size_t bytes) {
  char* const all = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (all == MAP_FAILED) return 0;
  const int made = madvise(all, bytes, MADV_POPULATE_WRITE) == 0;
  munmap(all, bytes);
  return made;
}

/* Seconds that `calls` mmap calls of `bytes` each take, `stride` apart in the addresses as in the file, over
   a reservation; with `populate`, each followed by the madvise that makes its pages present, over memory that
   the file has already. Negative where a call was refused. */
double bare_mmap(size_t calls, size_t bytes, size_t stride, int populate) {
  const int file = memfd_create("bare", MFD_CLOEXEC);
  if (file < 0) return -1;
  const size_t reserved = calls * stride;
  char* const start = mmap(NULL, reserved, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  double seconds = -1;
  const int ready = start != MAP_FAILED && ftruncate(file, (off_t)reserved) == 0 &&
                    (!populate || make_present(file, reserved));
  if (ready) {
    const double begin = now();
    size_t i = 0;
    while (i < calls &&
           mmap(start + i * stride, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                (off_t)(i * stride)) != MAP_FAILED &&
           (!populate || madvise(start + i * stride, bytes, MADV_POPULATE_WRITE) == 0)) {
      ++i;
    }
    if (i == calls) seconds = now() - begin;
  }
  if (start != MAP_FAILED) munmap(start, reserved);
  close(file);
  return seconds;
}
