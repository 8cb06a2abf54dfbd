// The mirror of kernel mappings against a plain model, and against the kernel itself.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <sys/mman.h>

#include <random>

#include "driver/mapping_mirror.h"
#include "host_fixture.h"

namespace vtensor {
namespace {

constexpr std::size_t kUnit = 4096;
constexpr Address kBase = 1 << 20;

// One cell a unit of addresses. copy-on-write mappings merge only with themselves.
class Model {
 public:
  explicit Model(std::size_t units) : cells_(units) {}

  void assign(std::size_t first, std::size_t units, MappingKind kind, std::uint64_t offset) {
    ++last_made_;
    for (std::size_t i = 0; i < units; ++i) {
      cells_[first + i] = {true, kind, kind == MappingKind::hole ? 0 : offset + i * kUnit,
                           kind == MappingKind::copy_on_write ? last_made_ : 0};
    }
  }
  void erase(std::size_t first, std::size_t units) {
    for (std::size_t i = 0; i < units; ++i) cells_[first + i] = {};
  }

  std::vector<KernelMapping> mappings() const {
    std::vector<KernelMapping> found;
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      if (!cells_[i].there) continue;
      if (i > 0 && follows(cells_[i - 1], cells_[i])) {
        found.back().bytes += kUnit;
      } else {
        found.push_back({kBase + i * kUnit, kUnit, cells_[i].offset, cells_[i].kind});
      }
    }
    return found;
  }

 private:
  struct Cell {
    bool there = false;
    MappingKind kind = MappingKind::hole;
    std::uint64_t offset = 0;
    int made = 0;
  };
  static bool follows(const Cell& a, const Cell& b) {
    return a.there && a.kind == b.kind && a.made == b.made &&
           (a.kind == MappingKind::hole || a.offset + kUnit == b.offset);
  }

  std::vector<Cell> cells_;
  int last_made_ = 0;
};

std::vector<KernelMapping> all_of(const MappingMirror& mirror, std::size_t units) {
  std::vector<KernelMapping> all;
  for (Address at = kBase; at < kBase + units * kUnit;) {
    const KernelMapping* const found = mirror.find(at);
    if (found != nullptr) all.push_back(*found);
    at = found != nullptr ? found->end() : at + kUnit;
  }
  return all;
}

}  // namespace

TEST_CASE("the mirror agrees with a plain model") {
  for (unsigned seed = 0; seed < 44; ++seed) {
    CAPTURE(seed);
    // The last few so large that the mappings fill many of the sequence's arrays.
    const std::size_t units_in_all = seed < 40 ? 60 : 900, most = seed < 40 ? 12 : 2;
    const int steps = seed < 40 ? 400 : 3000;
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return random() % n; };
    MappingMirror mirror;
    Model model(units_in_all);
    for (int step = 0; step < steps; ++step) {
      CAPTURE(step);
      const std::size_t first = below(units_in_all);
      const std::size_t units = 1 + below(std::min<std::size_t>(units_in_all - first, most));
      const Address begin = kBase + first * kUnit, end = begin + units * kUnit;
      mirror.provide(2);
      if (below(12) == 0) {
        mirror.erase(begin, end);
        model.erase(first, units);
      } else {
        const auto kind = static_cast<MappingKind>(below(3));
        // Often what would stand there if all were mapped in order, so that neighbours merge.
        const std::size_t moved = below(4) == 0 ? 100 : 0;
        const std::uint64_t offset = kind == MappingKind::hole ? 0 : (first + moved) * kUnit;
        mirror.assign({begin, end - begin, offset, kind});
        model.assign(first, units, kind, offset);
      }
      const auto expected = model.mappings();
      REQUIRE(all_of(mirror, units_in_all) == expected);
      REQUIRE(mirror.size() == expected.size());
      const Address at = kBase + below(units_in_all) * kUnit + 17;
      const KernelMapping* const found = mirror.find(at);
      const auto there = std::find_if(expected.begin(), expected.end(), [at](const auto& mapping) {
        return mapping.begin <= at && at < mapping.end();
      });
      REQUIRE((found != nullptr) == (there != expected.end()));
      if (found != nullptr) REQUIRE(*found == *there);
      const Address from = kBase + below(units_in_all) * kUnit, to = from + kUnit * (1 + below(20));
      const std::size_t runs = below(5);
      Model then = model;  // of runs that merge with nothing
      const std::size_t from_unit = (from - kBase) / kUnit;
      then.erase(from_unit, std::min((to - from) / kUnit, units_in_all - from_unit));
      REQUIRE(mirror.growth(from, to, runs) ==
              static_cast<std::ptrdiff_t>(then.mappings().size() + runs - expected.size()));
    }
  }
}

TEST_CASE("what was provided is enough for the operations that follow") {
  MappingMirror mirror;
  mirror.provide(2);
  mirror.assign({kBase, 1000 * kUnit, 0, MappingKind::hole});
  const auto unit_at = [](std::size_t i) {  // merges with no neighbour
    return KernelMapping{kBase + i * kUnit, kUnit, 2 * i * kUnit, MappingKind::writable};
  };
  SUBCASE("each leaves three mappings where there was one") {
    mirror.provide(200);
    for (std::size_t i = 0; i < 100; ++i) mirror.assign(unit_at(10 * i + 5));
    CHECK(mirror.size() == 201);
  }
  SUBCASE("each starts at the end of the one before") {
    mirror.provide(101);
    for (std::size_t i = 0; i < 100; ++i) mirror.assign(unit_at(i + 5));
    CHECK(mirror.size() == 102);
  }
}

TEST_CASE("the kernel holds as many mappings as the mirror says") {
  constexpr std::size_t kUnits = 64;
  const std::size_t unit = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const int memfd = memfd_create("mirror", MFD_CLOEXEC);
  REQUIRE(ftruncate(memfd, static_cast<off_t>(1024 * unit)) == 0);
  const int hole_flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  // Edges that merge with nothing, so that only the range counts.
  void* const start = mmap(nullptr, (kUnits + 2) * unit, PROT_NONE, hole_flags, -1, 0);
  REQUIRE(start != MAP_FAILED);
  const Address begin = reinterpret_cast<Address>(start) + unit;
  REQUIRE(mprotect(bytes_at(begin), kUnits * unit, PROT_READ) == 0);

  MappingMirror mirror;
  mirror.provide(2);
  mirror.assign({begin, kUnits * unit, 0, MappingKind::hole});
  for (unsigned seed = 0; seed < 2; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    for (int step = 0; step < 500; ++step) {
      CAPTURE(step);
      const std::size_t first = random() % kUnits;
      const std::size_t units = 1 + random() % std::min<std::size_t>(kUnits - first, 6);
      const Address at = begin + first * unit;
      const bool hole = random() % 3 == 0;
      const std::uint64_t offset = hole ? 0 : (first + (random() % 4 == 0 ? 300 : 0)) * unit;
      REQUIRE(mmap(bytes_at(at), units * unit, hole ? PROT_READ : PROT_READ | PROT_WRITE,
                   MAP_FIXED | (hole ? hole_flags : MAP_SHARED), hole ? -1 : memfd,
                   static_cast<off_t>(offset)) != MAP_FAILED);
      if (!hole) byte_at(at) = 1;
      mirror.provide(2);
      mirror.assign({at, units * unit, offset, hole ? MappingKind::hole : MappingKind::writable});
      REQUIRE(maps_of(begin, kUnits * unit).size() == mirror.size());
    }
  }
  munmap(start, (kUnits + 2) * unit);
  close(memfd);
}

}  // namespace vtensor
