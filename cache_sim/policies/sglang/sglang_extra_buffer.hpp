// SGLang 0.5.23's extra_buffer: beside its running state, a request has tracking slots, into which
// the forward leaves the states of positions that others can use. Rules:
// reference/caches/sglang.md, 1.8; the tree, the pools and everything else about a request are
// those of sglang-no-buffer.
#pragma once

#include "cache_sim/policies/sglang/sglang_policy.hpp"

namespace lockstep::cache_sim {

class SglangExtraBuffer final : public SglangPolicy {
 public:
  explicit SglangExtraBuffer(const SubjectOptions& options);

  int tracking_slots() const override { return lazy() ? 1 : 2; }

 private:
  void track(RadixRequest& request, std::uint32_t stop, Forward forward) override;
  void keep_verified(RadixRequest& request, std::uint32_t stop) override;
  Reply store_unfinished(RadixRequest& request, std::uint32_t up_to) override;
  bool store_finished(RadixRequest& request, std::uint32_t kept) override;
  void prepare_verification(RadixRequest& request, std::uint32_t tokens) override;
  void results_came(RadixRequest& request) override;

  struct Tracked {
    std::uint32_t slot;
    std::uint32_t size;
  };

  Tracked tracked_within(const RadixRequest& request, std::uint32_t most) const;
  std::uint32_t tracked_in_chunk(const RadixRequest& request, std::uint32_t stop) const;
  void track_chunk(RadixRequest& request, std::uint32_t stop);
  StateSlot next_slot(Tracking& tracking, std::uint32_t position);
  StateSlot launch_lazily(Tracking& tracking, std::uint32_t position);
  void track_verified_lazily(RadixRequest& request, std::uint32_t position);
  bool take_second_slot(Tracking& tracking);
  void keep(Tracking& tracking, std::uint32_t slot, std::uint32_t size);
  static void forget_launched(Tracking& tracking, std::uint32_t slot);
  bool lazy() const { return options_.lazy; }
  bool swaps_with_results() const;

  const std::uint32_t grid_;         ///< tokens between positions that a chunk can be tracked at
  const std::uint32_t decode_grid_;  ///< the same for decoding: a multiple of it
};

}  // namespace lockstep::cache_sim
