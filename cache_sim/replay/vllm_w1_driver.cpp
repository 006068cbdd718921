#include "cache_sim/replay/vllm_w1_driver.hpp"

#include <fmt/format.h>

#include <utility>

#include "reference/base/mix.hpp"

namespace lockstep::cache_sim {
namespace {

/// The cache of the loop, played by operations. The operations are reused, so that nothing is
/// allocated.
class OperatedCache {
 public:
  OperatedCache(const VllmW1& workload, const DriveSession& session)
      : workload_(workload),
        session_(session),
        known_(workload.requests.size()),
        is_known_(workload.requests.size()) {
    admit_.verb = Verb::admit;
    extend_.verb = Verb::extend;
    preempt_.verb = Verb::preempt;
    finish_.verb = Verb::finish;
    step_.verb = Verb::step;
  }

  bool stopped() const { return stopped_; }

  bool look_up(std::uint32_t number, std::uint32_t known) {
    const VllmW1Request& request = workload_.requests[number];
    admit_.id = request.id;
    admit_.tokens = request.tokens.prefix(known);
    admit_.prompt = request.prompt_size;
    if (!send(admit_) || reply_->refused != Refusal::none) return false;
    cached_ = static_cast<std::uint32_t>(reply_->get(ReplyField::cached));
    junction_ = reply_->get(ReplyField::junction);
    known_[number] = known;
    return true;
  }
  std::uint32_t cached(std::uint32_t /*number*/) const { return cached_; }

  std::optional<std::uint32_t> extend(std::uint32_t number, std::uint32_t known, std::uint32_t n) {
    const VllmW1Request& request = workload_.requests[number];
    extend_.id = request.id;
    extend_.n = n;
    // A token that was sampled in an earlier step comes with the extend that computes it.
    extend_.tokens =
        known > known_[number] ? request.tokens.slice(known_[number], known) : Tokens();
    if (!send(extend_) || reply_->refused != Refusal::none) return std::nullopt;
    known_[number] = known;
    return static_cast<std::uint32_t>(reply_->get(ReplyField::n));
  }

  void admitted(std::uint32_t number, std::int64_t step) {
    if (is_known_[number]) return;
    is_known_[number] = true;
    const VllmW1Request& request = workload_.requests[number];
    outcome_.hit_tokens += cached_;
    outcome_.prefixes.push_back(cached_);
    digest_.add(cached_);
    digest_.add(static_cast<std::uint64_t>(junction_));
    if (!session_.decided) return;
    outcome_.lines.push_back(fmt::format("[{}, \"{}\", {}, {}, {}, {}, {}]", step,
                                         request.id.text(), request.prefix, request.prompt_size,
                                         cached_, junction_, session_.decided()));
  }

  void preempt(std::uint32_t number) {
    preempt_.id = workload_.requests[number].id;
    send(preempt_);
  }
  void finish(std::uint32_t number) {
    finish_.id = workload_.requests[number].id;
    send(finish_);
  }
  void forward() { send(step_); }

  DrivenOutcome outcome() {
    outcome_.complete = !stopped_;
    outcome_.decision_digest = digest_.value;
    return std::move(outcome_);
  }

 private:
  bool send(const Operation& operation) {
    reply_ = session_.apply(operation);
    stopped_ |= reply_ == nullptr;
    return reply_ != nullptr;
  }

  const VllmW1& workload_;
  const DriveSession& session_;
  Operation admit_, extend_, preempt_, finish_, step_;
  const Reply* reply_ = nullptr;
  bool stopped_ = false;
  std::uint32_t cached_ = 0;
  std::int64_t junction_ = 0;
  std::vector<std::uint32_t> known_;  // tokens of each request that the cache has been told
  std::vector<bool> is_known_;
  Digest digest_;
  DrivenOutcome outcome_;
};

}  // namespace

DrivenOutcome drive(const VllmW1& workload, const DriveSession& session) {
  OperatedCache cache(workload, session);
  VllmW1Loop<OperatedCache>(workload, cache).run();
  return cache.outcome();
}

namespace {

class DrivenVllmW1 final : public DrivenWorkload {
 public:
  explicit DrivenVllmW1(VllmW1Options options) : options_(std::move(options)) {}

  Config config() const override {
    Config config;
    config.policy = "vllm-align";
    config.put("blocks", options_.blocks);
    config.put("block", kVllmW1Block);
    config.put("hash_block", options_.hash);
    config.put("retention", options_.retention);
    config.chunked_prefill = kVllmW1Budget;
    return config;
  }
  void generate() override { workload_ = VllmW1::generate(options_); }
  DrivenOutcome drive(const DriveSession& session) override {
    return cache_sim::drive(workload_, session);
  }

 private:
  VllmW1Options options_;
  VllmW1 workload_;
};

Result<std::unique_ptr<DrivenWorkload>> drive_vllm_w1(std::string_view parameters,
                                                      std::int64_t limit) {
  return VllmW1Options::parse(parameters)
      .map([&](VllmW1Options options) -> std::unique_ptr<DrivenWorkload> {
        if (limit > 0) options.requests = std::min(options.requests, limit);
        return std::make_unique<DrivenVllmW1>(std::move(options));
      });
}

const Registration<WorkloadDriver> kVllmW1{{"vllm-w1", drive_vllm_w1}};

}  // namespace

}  // namespace lockstep::cache_sim
