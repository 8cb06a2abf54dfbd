// Reports of faults in the rows of a KV cache: which layer, slot and token, and why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/fault_report.h"
#include "kv/slot_lengths.h"
#include "kv/slot_shape.h"

namespace vtensor {

class SlotFaults final : public faults::Range {
 public:
  SlotFaults(const SlotCacheShape& shape, RowGroup group,
             std::shared_ptr<const SlotLengths> lengths);

  void name(faults::Text& text, std::uintptr_t at) const noexcept override;
  void explain(faults::Text& text, std::uintptr_t at) const noexcept override;

 private:
  struct Place {
    std::size_t row, slot, token, byte;  // of the token's item
  };
  Place place_of(std::uintptr_t at) const noexcept;

  const std::size_t slots_, max_length_;
  const RowGroup group_;
  const std::shared_ptr<const SlotLengths> lengths_;
};

}  // namespace vtensor
