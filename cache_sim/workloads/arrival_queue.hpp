// A queue that merges the requests of concurrent sessions in order of arrival.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/protocol/request.hpp"

namespace lockstep::cache_sim {

class ArrivalQueue {
 public:
  bool empty() const { return heap_.empty(); }
  std::size_t size() const { return heap_.size(); }
  Nanoseconds earliest() const { return heap_.front().spec.at; }

  void push(RequestSpec spec) {
    heap_.push_back({std::move(spec), sequence_++});
    std::push_heap(heap_.begin(), heap_.end(), later);
  }
  /// The earliest request; of those at the same time, the one that was pushed first.
  RequestSpec pop() {
    std::pop_heap(heap_.begin(), heap_.end(), later);
    RequestSpec spec = std::move(heap_.back().spec);
    heap_.pop_back();
    return spec;
  }

 private:
  struct Due {
    RequestSpec spec;
    std::uint64_t sequence;
  };
  static bool later(const Due& a, const Due& b) {
    return a.spec.at != b.spec.at ? a.spec.at > b.spec.at : a.sequence > b.sequence;
  }
  std::vector<Due> heap_;
  std::uint64_t sequence_ = 0;
};

}  // namespace lockstep::cache_sim
