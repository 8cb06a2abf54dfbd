// What libstdc++.a, and code that sees the headers of a later C library, take from one after 2.28.

extern "C" {
// glibc 2.32. False is always right: libstdc++ then counts references with atomic operations.
[[gnu::visibility("hidden")]] char __libc_single_threaded = false;

// glibc 2.38. They also read binary numbers, which nothing here asks for.
unsigned long glibc_2_28_strtoul(const char* text, char** end, int base) __asm__("strtoul");
unsigned long long glibc_2_28_strtoull(const char* text, char** end, int base) __asm__("strtoull");
[[gnu::visibility("hidden")]] unsigned long __isoc23_strtoul(const char* text, char** end,
                                                             int base) {
  return glibc_2_28_strtoul(text, end, base);
}
[[gnu::visibility("hidden")]] unsigned long long __isoc23_strtoull(const char* text, char** end,
                                                                   int base) {
  return glibc_2_28_strtoull(text, end, base);
}
}
