// What libstdc++.a takes from a C library after 2.28.

// glibc 2.32. False is always right: libstdc++ then counts references with atomic operations.
extern "C" {
[[gnu::visibility("hidden")]] char __libc_single_threaded = false;
}
