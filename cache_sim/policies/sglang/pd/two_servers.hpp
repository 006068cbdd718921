// Prefill and decode apart, policy `sglang-pd`: one server of sglang-no-buffer computes prompts,
// another one goes on from there, and KV and states move between them in copies that are in flight
// (disaggregation/prefill.py, decode.py). Rules: reference/caches/disaggregation.md. The decode
// server's slots are slots of the same LayerState, with numbers after those of the prefill server.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string_view>
#include <vector>

#include "cache_sim/policies/sglang/sglang_policy.hpp"

namespace lockstep::cache_sim {

/// The rules of moving requests; a planted defect sets one of them to a wrong value.
struct PdRules {
  bool source_waits = true;  ///< for the end of the transfer
  bool decode_waits = true;  ///< likewise
  bool stores_before_sending = true;
  bool aborted_targets_wait = true;  ///< for the end of the copies that write them
  bool failure_ends_request = true;
  bool keeps_last_token = true;  ///< it is left to the decode server
  bool sends_state = true;
  bool state_leaves_last = true;  ///< all slices of it go with the last tokens
  bool conv_in_segments = true;   ///< each is cut into slices, not the three as one
  /// The tensors of keys and values of both servers are paired by their layers, not as the two
  /// halves of each server's list.
  bool pairs_layers = true;
};

/// The servers that have a draft model beside the model.
enum class DraftModel : std::uint8_t { none, both, decode };
/// Their names in a config, in that order.
inline constexpr std::string_view kDraftModels[] = {"none", "both", "decode"};

/// One of the two. The decode server's first tokens of a request come in copies.
class PdServer final : public SglangPolicy {
 public:
  PdServer(const SubjectOptions& options, FirstSlots first, bool receives)
      : SglangPolicy(options, SglangRules{}, first), receives_(receives) {}

  RadixRequest* request(Name id) { return find(id); }
  LayerState& layers() { return layers_; }

 protected:
  void receive(RadixRequest& request, std::uint32_t size) override;

 private:
  bool receives_;
};

/// A copy in flight, of a slice of what a load has sent.
struct PdCopy {
  std::uint64_t id;
  TierCopy slots;
  bool is_abandoned = false;
};

/// A request until the decode server goes on with it, and after that as long as it runs.
struct MovingRequest {
  enum class Stage : std::uint8_t {
    prefills,  ///< the prefill server has it, and perhaps slots are taken on the other one
    is_sent,   ///< all of it has been sent
    decodes,   ///< the decode server has it
    failed,    ///< its transfer has; nobody has it, or only copies that write its slots
    left,      ///< its client has left; copies still write its slots
  };
  Stage stage = Stage::prefills;
  Name id;
  Name salt;
  Tokens tokens;  ///< as admitted; the decode server computes the last one
  std::int64_t prompt = Operation::kAbsent;
  std::uint64_t number = 0;        ///< of its transfer, in the order in which they began
  bool has_target = false;         ///< the decode server has taken slots for it
  bool has_source = true;          ///< the prefill server still has it
  std::uint32_t target_begin = 0;  ///< tokens that the decode server's own cache has of it
  std::uint32_t sent = 0;          ///< tokens whose KV was sent
  bool has_failed = false;         ///< one of its copies has, and no settle came since
  std::deque<PdCopy> copies;       ///< in flight
};

class TwoServers final : public Subject {
 public:
  explicit TwoServers(const SubjectOptions& options);

  Result<Reply> apply(const Operation& operation) override;
  std::optional<Snapshot> snapshot() const override;

  // For the auditor.
  PdServer& prefill() { return prefill_; }
  PdServer& decode() { return decode_; }
  const std::map<std::uint32_t, MovingRequest>& moving() const { return moving_; }
  /// Called after each operation that one of the two servers has answered.
  using Watch = std::function<void(bool of_decode, const Operation&, const Reply&)>;
  void watch(Watch watch) { watch_ = std::move(watch); }

 private:
  using Stage = MovingRequest::Stage;

  Result<Reply> ask(PdServer& server, const Operation& operation);
  Result<Reply> admit(const Operation& operation);
  Result<Reply> extend(const Operation& operation, MovingRequest& request);
  Result<Reply> load(const Operation& operation, MovingRequest& request);
  Result<Reply> checkpoint(const Operation& operation, MovingRequest& request);
  Result<Reply> leave(const Operation& operation, MovingRequest& request);
  Result<Reply> end_copy(const Operation& operation);
  Result<Reply> settle();
  Result<Reply> evict(const Operation& operation);
  Result<Reply> flush();
  Result<Reply> check();
  Result<Reply> of_request(const Operation& operation);

  bool is_read(const MovingRequest& request, const RadixRequest& source) const;
  Refusal take_target(Name id, MovingRequest& request, Reply& reply);
  void send(Name id, MovingRequest& request, bool with_state, Reply& reply);
  void cut_conv(TierCopy& copy) const;
  std::vector<TierCopy::Channels> kv_tensors() const;
  void abandon(MovingRequest& request);
  bool conclude(Name id, MovingRequest& request);
  void end(PdServer& server, Verb verb, Name id);

  const Config config_;
  const PdRules rules_;
  const std::uint32_t slices_;
  const DraftModel drafts_;
  PdServer prefill_, decode_;
  std::map<std::uint32_t, MovingRequest> moving_;  // by the index of its name
  std::uint64_t copies_ = 0, transfers_ = 0;       // so far
  Watch watch_;
};

}  // namespace lockstep::cache_sim
