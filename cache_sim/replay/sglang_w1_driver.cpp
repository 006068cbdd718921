#include "cache_sim/replay/sglang_w1_driver.hpp"

#include <algorithm>

#include "cache_sim/workloads/sglang_w1.hpp"
#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {
namespace {

constexpr std::int64_t kInFlight = 8;
constexpr std::int64_t kChunk = 1024;

/// The kinds of events in the decision digest.
enum class Event : std::uint8_t { kv_eviction = 1, slot_eviction = 2, prefix = 3 };

/// Drives the workload. It reuses its operations and allocates nothing, because benchmarks measure
/// it.
class Driver {
 public:
  Driver(const SglangW1& workload, const ApplyOperation& apply)
      : workload_(workload), apply_(apply) {
    admit_.verb = Verb::admit;
    prefill_.verb = Verb::extend;
    checkpoint_.verb = Verb::checkpoint;
    decode_.verb = Verb::extend;
    finish_.verb = Verb::finish;
    outcome_.prefixes.reserve(workload.requests.size());
  }

  DrivenOutcome run() {
    outcome_.complete = admit_all() && finish_until(request_count());
    outcome_.decision_digest = digest_.value;
    return std::move(outcome_);
  }

 private:
  std::int64_t request_count() const {
    return static_cast<std::int64_t>(workload_.requests.size());
  }

  bool admit_all() {
    for (std::int64_t k = 0; k < request_count(); ++k) {
      const SglangW1Request& request = workload_.requests[static_cast<std::size_t>(k)];
      // Requests finish first in, first out: the conversation's previous request has finished once
      // all requests up to it have.
      if (!finish_until(std::max(k - kInFlight + 1, request.previous + 1))) return false;
      if (!prefill(request)) return false;
    }
    return true;
  }

  bool prefill(const SglangW1Request& request) {
    admit_.id = prefill_.id = checkpoint_.id = request.id;
    admit_.tokens = request.tokens.prefix(request.prompt_size);
    admit_.prompt = request.prompt_size;
    if (!send(admit_)) return false;
    const std::int64_t cached = reply_->get(ReplyField::cached);
    outcome_.hit_tokens += cached;
    outcome_.prefixes.push_back(cached);
    digest_.add(static_cast<std::uint64_t>(Event::prefix));
    digest_.add(static_cast<std::uint64_t>(cached));
    note_eviction(Event::slot_eviction);
    for (std::int64_t at = cached; at < request.prompt_size; at += prefill_.n) {
      prefill_.n = std::min<std::int64_t>(kChunk, request.prompt_size - at);
      if (!send(prefill_)) return false;
      note_eviction(Event::kv_eviction);
      if (!send(checkpoint_) && !(reply_ != nullptr && reply_->refused == Refusal::no_state_slot))
        return false;
    }
    return true;
  }

  /// Finishes requests, the oldest first, until `count` have finished.
  bool finish_until(std::int64_t count) {
    for (; finished_ < count; ++finished_) {
      const SglangW1Request& request = workload_.requests[static_cast<std::size_t>(finished_)];
      decode_.id = finish_.id = request.id;
      // The last output token is sampled and never computed.
      const std::uint32_t computed = request.tokens.size() - 1;
      decode_.n = computed - request.prompt_size;
      if (decode_.n > 0) {
        decode_.tokens = request.tokens.slice(request.prompt_size, computed);
        if (!send(decode_)) return false;
        note_eviction(Event::kv_eviction);
      }
      if (!send(finish_)) return false;
    }
    return true;
  }

  bool send(const Operation& operation) {
    reply_ = apply_(operation);
    return reply_ != nullptr && reply_->refused == Refusal::none;
  }

  void note_eviction(Event event) {
    const std::int64_t kv = reply_->get(ReplyField::evicted_kv);
    const std::int64_t states = reply_->get(ReplyField::evicted_states);
    if (kv == 0 && states == 0) return;
    digest_.add(static_cast<std::uint64_t>(event));
    digest_.add(static_cast<std::uint64_t>(kv));
    digest_.add(static_cast<std::uint64_t>(states));
  }

  const SglangW1& workload_;
  const ApplyOperation& apply_;
  Operation admit_, prefill_, checkpoint_, decode_, finish_;
  const Reply* reply_ = nullptr;
  std::int64_t finished_ = 0;  // number of finished requests; the later ones are in flight
  Digest digest_;
  DrivenOutcome outcome_;
};

}  // namespace

DrivenOutcome drive(const SglangW1& workload, const ApplyOperation& apply) {
  return Driver(workload, apply).run();
}

namespace {

class DrivenSglangW1 final : public DrivenWorkload {
 public:
  explicit DrivenSglangW1(const SglangW1Options& options) : options_(options) {}

  Config config() const override {
    Config config;
    config.kv_tokens = options_.kv_tokens;
    config.state_slots = options_.state_slots;
    config.chunked_prefill = kChunk;
    return config;
  }
  void generate() override { workload_ = SglangW1::generate(options_); }
  DrivenOutcome drive(const DriveSession& session) override {
    return cache_sim::drive(workload_, session.apply);
  }

 private:
  SglangW1Options options_;
  SglangW1 workload_;
};

Result<std::unique_ptr<DrivenWorkload>> drive_sglang_w1(std::string_view parameters,
                                                        std::int64_t limit) {
  return SglangW1Options::parse(parameters)
      .map([&](SglangW1Options options) -> std::unique_ptr<DrivenWorkload> {
        if (limit > 0) options.requests = std::min(options.requests, limit);
        return std::make_unique<DrivenSglangW1>(options);
      });
}

const Registration<WorkloadDriver> kSglangW1{{"sglang-w1", drive_sglang_w1}};

}  // namespace

}  // namespace lockstep::cache_sim
