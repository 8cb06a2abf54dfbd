// A list of clients, each with a place of its own.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "policy/roster.h"

namespace vtensor {

class Client {};

namespace {

struct Member {
  std::shared_ptr<Client> client = std::make_shared<Client>();
  Roster::Place place;
};

std::vector<const Client*> on(const Roster& roster) {
  std::vector<const Client*> found;
  for (const std::shared_ptr<Client>& client : roster) found.push_back(client.get());
  CHECK(found.size() == roster.size());
  CHECK(found.empty() == roster.empty());
  return found;
}

std::vector<const Client*> the(std::vector<const Member*> members) {
  std::vector<const Client*> clients;
  for (const Member* member : members) clients.push_back(member->client.get());
  return clients;
}

}  // namespace

TEST_CASE("clients stand in their order, and are kept alive") {
  Member a, b, c;
  Roster roster;
  CHECK(on(roster).empty());
  roster.add(b.place, b.client);
  roster.add(c.place, c.client);
  roster.add_first(a.place, a.client);
  CHECK(on(roster) == the({&a, &b, &c}));
  CHECK(roster.front() == a.client);
  CHECK(b.place.taken());
  CHECK(b.client.use_count() == 2);
  CHECK(roster.remove(b.place) == b.client);
  CHECK(on(roster) == the({&a, &c}));
  CHECK_FALSE(b.place.taken());
  CHECK(b.client.use_count() == 1);
  CHECK(roster.remove(b.place) == nullptr);
  roster.add(b.place, b.client);
  CHECK(on(roster) == the({&a, &c, &b}));
  for (Member* member : {&a, &b, &c}) roster.remove(member->place);
  CHECK(on(roster).empty());
}

TEST_CASE("while a list is walked, those passed may leave it") {
  std::vector<Member> members(5);
  Roster roster;
  for (Member& member : members) roster.add(member.place, member.client);
  std::size_t i = 0;
  for (auto at = roster.begin(); at != roster.end(); ++i) {
    const std::shared_ptr<Client> client = *at++;
    CHECK(client == members[i].client);
    if (i % 2 == 0) roster.remove(members[i].place);
  }
  CHECK(on(roster) == the({&members[1], &members[3]}));
}

}  // namespace vtensor
