// Makes a node of a set or a map in advance: inserting it later needs no memory.
#pragma once

namespace vtensor {

template <typename Container>
typename Container::node_type make_node() {
  Container one;
  one.emplace();
  return one.extract(one.begin());
}

}  // namespace vtensor
