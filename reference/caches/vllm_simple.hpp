// The oracle of the host's blocks of `vllm-align`: SimpleCPUOffloadScheduler of vLLM 0.33 (vllm.md,
// 44 to 50), over plain lists. It knows which copies there are, not what they bring: a copy is
// decided, flies, or has landed and is not settled. The host's blocks are a pool of their own.
//
//   here        vLLM                              what it is
//   hits        _pending_cpu_hits                 the host's blocks of a hit, by group, until the
//                                                 request has its own
//   passed      num_stored_blocks                 by group, the first column not looked at yet
//   busy        _in_flight_store_gpu_blocks       blocks that an eager store reads
//   last_seen   _cursor                           the free block that a lazy store looked at last
//   Batch       TransferMeta, LoadRequestState    copies that a step starts in one direction
#pragma once

#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "reference/caches/vllm_offload.hpp"
#include "reference/caches/vllm_pool.hpp"

namespace lockstep::reference {

class VllmSimple : public VllmPool {
 public:
  using Id = VllmOffload::Id;
  using Shown = VllmOffload::Shown;
  using Columns = std::vector<std::vector<Number>>;  ///< by group
  struct Row {
    Id id;
    Shown request;
    Count before;   ///< tokens that earlier steps have computed
    bool is_first;  ///< of the request's rows
  };
  struct Config {
    std::vector<VllmOffload::Group> groups;
    Count hash_block, scheduler_block, blocks, step_tokens;
    bool is_lazy;
    bool inside;  ///< hits may end inside a block
  };

  /// The device's blocks outlive it.
  VllmSimple(VllmPool& device, Config config);

  /// get_num_new_matched_tokens() has found these.
  void pin(Id id, const Columns& columns);
  /// update_state_after_alloc()
  void allocated(Id id, const Shown& request, Count computed, Count external);
  /// request_finished_all_groups()
  void finish(Id id, const Shown& request);
  void preempt(Id id);
  /// build_connector_meta(), then the worker's part of the step before its forward.
  void build(const std::vector<Row>& rows, const std::vector<VllmOffload::Offer>& offers);
  /// wait_for_save(): stores read what the forward has written.
  void save();
  bool land(bool is_load);
  /// update_connector_output(): the number of batches, and the requests whose loads have come.
  std::pair<Count, std::vector<Id>> settle();
  /// reset(): the number of host blocks that lost their keys.
  Count reset();
  /// Appends the numbers that contents= covers.
  void tell(std::vector<Count>& numbers) const;

 private:
  struct Pair {
    Number device, host;
  };
  struct Batch {
    bool is_load;
    std::vector<std::pair<Id, std::vector<Pair>>> copies;  ///< of a store: of no request
    bool landed = false;
    bool is_void = false;  ///< a store that a reset has given up
  };

  bool lacks(Number device) const;
  std::vector<Number> confirmed(const Shown& request, Count computed, std::vector<Count>& passed);
  std::optional<Number> tail(const Shown& request) const;
  std::vector<Number> next_evicted();
  void store(const std::vector<Number>& blocks, std::vector<Pair>& copies);
  void unpin(Id id);

  VllmPool& device_;
  Config config_;
  std::map<Id, Columns> hits_;
  std::map<Id, std::vector<Count>> passed_;
  std::set<Number> busy_;
  Number last_seen_ = 0;  // 0: none
  bool flushes_ = false;
  std::vector<Pair> of_step_, of_ended_;
  Batch loads_{.is_load = true, .copies = {}};
  std::vector<Batch> batches_;  // in the order in which they start
};

}  // namespace lockstep::reference
