// A list of buffers, each with a place of its own.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "core/roster.h"

namespace vtensor {

class Buffer {};

namespace {

struct Member {
  std::shared_ptr<Buffer> buffer = std::make_shared<Buffer>();
  Roster::Place place;
};

std::vector<const Buffer*> on(const Roster& roster) {
  std::vector<const Buffer*> found;
  for (const std::shared_ptr<Buffer>& buffer : roster) found.push_back(buffer.get());
  CHECK(found.size() == roster.size());
  CHECK(found.empty() == roster.empty());
  return found;
}

std::vector<const Buffer*> the(std::vector<const Member*> members) {
  std::vector<const Buffer*> buffers;
  for (const Member* member : members) buffers.push_back(member->buffer.get());
  return buffers;
}

}  // namespace

TEST_CASE("buffers stand in their order, and are kept alive") {
  Member a, b, c;
  Roster roster;
  CHECK(on(roster).empty());
  roster.add(b.place, b.buffer);
  roster.add(c.place, c.buffer);
  roster.add_first(a.place, a.buffer);
  CHECK(on(roster) == the({&a, &b, &c}));
  CHECK(roster.front() == a.buffer);
  CHECK(b.place.taken());
  CHECK(b.buffer.use_count() == 2);
  CHECK(roster.remove(b.place) == b.buffer);
  CHECK(on(roster) == the({&a, &c}));
  CHECK_FALSE(b.place.taken());
  CHECK(b.buffer.use_count() == 1);
  CHECK(roster.remove(b.place) == nullptr);
  roster.add(b.place, b.buffer);
  CHECK(on(roster) == the({&a, &c, &b}));
  for (Member* member : {&a, &b, &c}) roster.remove(member->place);
  CHECK(on(roster).empty());
}

TEST_CASE("while a list is walked, those passed may leave it") {
  std::vector<Member> members(5);
  Roster roster;
  for (Member& member : members) roster.add(member.place, member.buffer);
  std::size_t i = 0;
  for (auto at = roster.begin(); at != roster.end(); ++i) {
    const std::shared_ptr<Buffer> buffer = *at++;
    CHECK(buffer == members[i].buffer);
    if (i % 2 == 0) roster.remove(members[i].place);
  }
  CHECK(on(roster) == the({&members[1], &members[3]}));
}

}  // namespace vtensor
