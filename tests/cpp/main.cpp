// doctest itself and its `main`, which take longer to compile than most of the tests that they run.
#define DOCTEST_CONFIG_IMPLEMENT  // the next line does it too, unless the header was precompiled
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
