// Reports of faults in rows that grow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/fault_report.h"
#include "base/interval.h"
#include "vmm/row_shape.h"

namespace vtensor {

class RowFaults final : public faults::Range {
 public:
  explicit RowFaults(const RowShape& shape) : shape_(shape) {}

  // The owner's positions, as they are from now on; a buffer whose owner has left has none.
  void follow(Interval positions, bool owned) noexcept {
    begin_.store(positions.begin, std::memory_order_relaxed);
    end_.store(positions.end, std::memory_order_relaxed);
    owned_.store(owned, std::memory_order_relaxed);
  }

  void name(faults::Text& text, std::uintptr_t at) const noexcept override;
  void explain(faults::Text& text, std::uintptr_t at) const noexcept override;

 private:
  std::size_t row_bytes() const noexcept { return bytes() / shape_.rows; }
  // The position in its row that an address lies at; -1 before position 0.
  std::ptrdiff_t position_of(std::uintptr_t at) const noexcept;

  const RowShape shape_;
  std::atomic<std::size_t> begin_{0}, end_{0};
  std::atomic<bool> owned_{true};
};

}  // namespace vtensor
