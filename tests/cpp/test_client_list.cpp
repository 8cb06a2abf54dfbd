// A list of clients, each with a hook of its own.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "policy/client_list.h"

namespace vtensor {

class Client {};

namespace {

struct Member {
  std::shared_ptr<Client> client = std::make_shared<Client>();
  ClientList::Hook hook;
};

std::vector<const Client*> on(const ClientList& list) {
  std::vector<const Client*> found;
  for (const std::shared_ptr<Client>& client : list) found.push_back(client.get());
  CHECK(found.size() == list.size());
  CHECK(found.empty() == list.empty());
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
  ClientList list;
  CHECK(on(list).empty());
  list.add(b.hook, b.client);
  list.add(c.hook, c.client);
  list.add_first(a.hook, a.client);
  CHECK(on(list) == the({&a, &b, &c}));
  CHECK(list.front() == a.client);
  CHECK(b.hook.linked());
  CHECK(b.client.use_count() == 2);
  CHECK(list.remove(b.hook) == b.client);
  CHECK(on(list) == the({&a, &c}));
  CHECK_FALSE(b.hook.linked());
  CHECK(b.client.use_count() == 1);
  CHECK(list.remove(b.hook) == nullptr);
  list.add(b.hook, b.client);
  CHECK(on(list) == the({&a, &c, &b}));
  for (Member* member : {&a, &b, &c}) list.remove(member->hook);
  CHECK(on(list).empty());
}

TEST_CASE("while a list is walked, those passed may leave it") {
  std::vector<Member> members(5);
  ClientList list;
  for (Member& member : members) list.add(member.hook, member.client);
  std::size_t i = 0;
  for (auto at = list.begin(); at != list.end(); ++i) {
    const std::shared_ptr<Client> client = *at++;
    CHECK(client == members[i].client);
    if (i % 2 == 0) list.remove(members[i].hook);
  }
  CHECK(on(list) == the({&members[1], &members[3]}));
}

}  // namespace vtensor
