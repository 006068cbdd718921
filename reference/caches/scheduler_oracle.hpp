// The oracle of the plain scheduler: its rules (cache_sim/server/schedulers.md) implemented a
// second time, independently (schedule_listener.hpp).
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "reference/caches/schedule_listener.hpp"
#include "reference/protocol/schedule.hpp"

namespace lockstep::reference {

class SchedulerOracle : public ScheduleListener {
 public:
  explicit SchedulerOracle(const SchedulerOptions& options) : options_(options) {}

 protected:
  enum class State : std::uint8_t { expected, waiting, running, ended };
  struct Request {
    const RequestSpec* spec = nullptr;
    State state = State::expected;
    std::uint32_t computed = 0;  ///< tokens of which the subject has, or will have, KV and state
    std::uint32_t goal = 0;      ///< the tokens of its last admission: below it, it prefills
    std::uint32_t told = 0;      ///< tokens that the subject knows
    std::uint32_t sampled = 0;
    std::size_t verification = 0;
    bool was_running = false;
    bool prefills() const { return computed < goal; }
  };
  /// Tokens that a verification keeps; none for other rows.
  struct Kept {
    std::uint32_t output = 0;
    std::uint32_t behind = 0;  ///< the output's end
    std::uint32_t all() const { return output + behind; }
  };
  struct Row {
    RequestNumber request;
    std::uint32_t begin;
    std::uint32_t tokens;
    Kept kept;
    bool chunk;
    bool ends_prompt;
    bool stored = false;  ///< its checkpoint went before its result
    bool samples() const { return !chunk || ends_prompt; }
  };

  SchedulerStatus status(RequestNumber request) override;
  void play(const SchedulerEvent& event) override;
  std::unique_ptr<ScheduleListener> copy() const override {
    return std::make_unique<SchedulerOracle>(*this);
  }
  void arrive(RequestNumber number, const RequestSpec* spec);
  void abort(RequestNumber number);
  void step();
  // Rules that the oracles of servers replace.
  virtual void begin_step() {}
  virtual void decide();
  virtual bool waits_for_forwards_without_requests() const { return false; }
  virtual bool preempted_goes_first() const { return true; }
  void store_chunk_ends();
  void prefill();
  void prefill(RequestNumber number);
  void admit();
  void decode();
  void forward();
  void take_results();
  void take_result(Row& row);

  std::uint32_t compute(RequestNumber number, std::uint32_t tokens);
  std::uint32_t compute(RequestNumber number, const Operation& extend, Kept kept);
  Operation extend_by(RequestNumber number, std::uint32_t tokens) const;
  Operation verification(RequestNumber number, Kept& kept) const;
  static Tokens text_of(const RequestSpec& spec);
  void give_way(RequestNumber number);
  void drop(RequestNumber number);
  virtual void leave(RequestNumber number);
  void wait(RequestNumber number, bool before_equals);
  void stop_waiting(RequestNumber number);
  void end(RequestNumber number, FinishReason reason);

  Operation admission_of(RequestNumber number) const;
  void enter(RequestNumber number, const Reply& reply);

  Operation about(Verb verb, RequestNumber number) const;
  Request& at(RequestNumber number);

  SchedulerOptions options_;
  std::vector<Request> requests_;
  std::map<std::int64_t, std::deque<RequestNumber>, std::greater<>> queue_;  // by priority
  std::vector<RequestNumber> running_;  // in order of admission
  std::vector<Row> decided_;            // of the step that is decided now, or was last
  std::vector<Row> under_way_;          // whose results come next
  std::int64_t budget_ = 0;
  bool awaits_results_ = false;  // results are the next thing that comes
  std::vector<Row> last_rows_;   // of the last forward
  // A step waits for the results of forwards whose requests have all ended:
  bool computes_ = false;        // the forward of decided_ runs, even if its requests have left
  bool computed_ahead_ = false;  // so does that of under_way_
};

}  // namespace lockstep::reference
