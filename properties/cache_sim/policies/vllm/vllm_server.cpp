#include "properties/cache_sim/policies/vllm/vllm_server.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <vector>

#include "cache_sim/policies/vllm/vllm_policy.hpp"
#include "cache_sim/search/swarm.hpp"
#include "reference/base/require.hpp"

namespace lockstep::testing_support {
namespace {

using namespace cache_sim;

constexpr std::int64_t kBlock = 16;

struct ServedRequest {
  Name id;
  Tokens known;  // prompt and outputs
  std::int64_t prompt = 0;
  std::int64_t outputs = 0;  // when it ends
  std::int64_t told = 0;     // of `known`, what the policy has been told
  std::int64_t computed = 0;
  Tokens drafts;  // of this step
  bool runs = false;
  bool scheduled = false;
};

class VllmServer {
 public:
  VllmServer(const Config& config, std::uint64_t seed, std::uint64_t stream, const Defect* defect,
             int external)
      : config_(config),
        external_(external),
        draw_(seed, stream),
        policy_({.config = config, .layers = nullptr, .defect = defect}, *BlockRules::of(config)),
        labels_(policy_.manager().rules(), policy_.manager().pool()),
        most_running_(static_cast<std::size_t>(draw_.between(2, 16))),
        budget_(draw_.between(1, 24) * kBlock + draw_.between(0, 8)),
        zero_drafts_(draw_.below(8)) {
    config_.chunked_prefill = budget_;
    policy_.follow(labels_);
  }

  VllmRun run(std::int64_t steps) {
    while (run_.steps < steps && run_.finding.empty()) {
      try {
        step();
      } catch (const std::exception& thrown) {
        run_.finding = thrown.what();
      }
    }
    run_.checks = labels_.checks();
    return run_;
  }

 private:
  /// The model's output after these tokens: equal prompts have equal answers.
  static Tokens answer(const Tokens& prompt, std::int64_t first, std::int64_t size) {
    const auto document = static_cast<Document>(prompt.digest() | std::uint64_t{1} << 31);
    return Tokens::of_document(document, static_cast<std::uint32_t>(first),
                               static_cast<std::uint32_t>(size));
  }
  static Tokens next_tokens(const ServedRequest& request, std::int64_t size) {
    const Tokens prompt = request.known.prefix(static_cast<std::uint32_t>(request.prompt));
    return answer(prompt, request.known.size() - request.prompt, size);
  }

  Reply apply(const Operation& operation) {
    const Result<Reply> reply = policy_.apply(operation);
    require(reply.has_value(), reply ? "" : reply.error().text);
    return *reply;
  }
  Reply apply(Verb verb, const ServedRequest& request) {
    Operation operation{.verb = verb};
    operation.id = request.id;
    return apply(operation);
  }

  void step() {
    ++run_.steps;
    while (waiting_.size() < 3) arrive();
    left_ = budget_;
    bool preempted = false;
    for (std::size_t i = 0; i < running_.size() && left_ > 0; ++i)
      while (i < running_.size() && !schedule(running_[i])) {
        preempted = true;
        preempt_last();
      }
    if (!preempted) admit_waiting();
    run_.copies += static_cast<std::int64_t>(policy_.manager().copies().size());
    apply({.verb = Verb::step});
    take_outputs();
    labels_.check_all();
    if (!labels_.findings().empty()) run_.finding = labels_.findings().front().text;
  }

  /// Often an earlier conversation goes on, or a prompt that begins like an earlier one.
  void arrive() {
    ServedRequest request;
    request.id = Name::intern(fmt::format("r{}", arrived_++));
    Tokens prompt;
    if (!waiting_.empty() && draw_.chance(1, 6)) {
      prompt = waiting_.back().known.prefix(static_cast<std::uint32_t>(waiting_.back().prompt));
    } else if (!seen_.empty() && draw_.chance(7, 10)) {
      prompt = seen_[seen_.size() - 1 - draw_.below(std::min<std::size_t>(seen_.size(), 12))];
      if (draw_.chance(1, 2))
        prompt = prompt.prefix(static_cast<std::uint32_t>(draw_.between(1, prompt.size())));
    }
    if (prompt.size() > 20 * kBlock) prompt = prompt.prefix(6 * kBlock);
    if (prompt.empty() || draw_.chance(3, 4))
      prompt = prompt.followed_by(Tokens::of_document(
          static_cast<Document>(arrived_ + 1), 0,
          static_cast<std::uint32_t>(draw_.between(1, draw_.chance(1, 4) ? 8 * kBlock : kBlock))));
    request.known = prompt;
    request.prompt = prompt.size();
    request.outputs = draw_.between(1, draw_.chance(1, 2) ? 8 : 5 * kBlock);
    seen_.push_back(prompt);
    waiting_.push_back(request);
  }

  /// A running request's part of the step; false where it finds no block.
  bool schedule(ServedRequest& request) {
    Operation extend{.verb = Verb::extend};
    extend.id = request.id;
    extend.tokens =
        request.known.slice(static_cast<std::uint32_t>(request.told), request.known.size());
    const std::int64_t fresh = request.known.size() - request.computed;
    extend.n = std::min(fresh, left_);
    const bool decodes = fresh == 1 && request.computed >= request.prompt && request.runs;
    if (decodes && config_.drafts > 0 && left_ > config_.drafts && !draw_.chance(zero_drafts_, 8)) {
      extend.drafts = drafts_for(request);
      extend.n = 1 + extend.drafts.size();
    }
    const Reply reply = apply(extend);
    if (reply.refused != Refusal::none) return false;
    const std::int64_t n = reply.get(ReplyField::n);
    if (n == 0) return true;  // passed over in this step
    request.told = request.known.size();
    request.computed += n;
    request.drafts = extend.drafts;
    request.scheduled = true;
    for (const BlockTable& table : policy_.request(request.id)->blocks.tables)
      run_.inner_states += table.checkpoint > 0 ? 1 : 0;
    left_ -= n;
    return true;
  }

  /// Some of what the model will say, then something else.
  Tokens drafts_for(const ServedRequest& request) {
    const std::int64_t size = draw_.between(1, config_.drafts);
    const std::int64_t right = draw_.between(0, size);
    return next_tokens(request, right)
        .followed_by(Tokens::of_document(1, static_cast<std::uint32_t>(draw_.below(1000)),
                                         static_cast<std::uint32_t>(size - right)));
  }

  void preempt_last() {
    ++run_.preemptions;
    ServedRequest request = running_.back();
    running_.pop_back();
    apply(Verb::preempt, request);
    request.computed = request.told = 0;
    request.runs = false;
    waiting_.push_front(request);
  }

  void admit_waiting() {
    while (!waiting_.empty() && running_.size() < most_running_ && left_ > 0) {
      ServedRequest& request = waiting_.front();
      Operation admit{.verb = Verb::admit};
      admit.id = request.id;
      admit.tokens = request.known;
      admit.prompt = request.prompt;
      if (draw_.chance(static_cast<std::uint64_t>(external_), 10))
        admit.external = draw_.between(0, admit.tokens.size());
      request.computed = apply(admit).get(ReplyField::cached);
      const VllmRequest& admitted = *policy_.request(request.id);
      const std::int64_t external = admitted.external;
      request.told = request.known.size();
      if (!schedule(request) || !request.scheduled) {
        apply(Verb::preempt, request);
        request.computed = request.told = 0;
        if (running_.empty() && request.known.size() / kBlock > config_.number("blocks") / 2)
          waiting_.pop_front();  // it never fits
        return;
      }
      request.runs = true;
      run_.received += external;
      running_.push_back(request);
      waiting_.pop_front();
    }
  }

  void take_outputs() {
    std::vector<ServedRequest> staying;
    for (ServedRequest& request : running_) {
      if (request.scheduled) take_output(request);
      request.scheduled = false;
      if (request.known.size() - request.prompt >= request.outputs) {
        ++run_.finished;
        seen_.push_back(request.known);
        apply(Verb::finish, request);
      } else if (draw_.chance(1, 400)) {
        apply(Verb::abort, request);
      } else {
        staying.push_back(request);
      }
    }
    running_ = std::move(staying);
    if (seen_.size() > 64) seen_.erase(seen_.begin(), seen_.begin() + 32);
  }

  void take_output(ServedRequest& request) {
    if (request.drafts.empty()) {
      if (request.computed == request.known.size())
        request.known = request.known.followed_by(next_tokens(request, 1));
      return;
    }
    const Tokens said = next_tokens(request, request.drafts.size() + 1);
    const std::uint32_t right = said.common(0, request.drafts, 0, request.drafts.size());
    const auto room =
        static_cast<std::uint32_t>(request.outputs - (request.known.size() - request.prompt));
    Operation accept{.verb = Verb::accept};
    accept.id = request.id;
    accept.tokens = said.prefix(std::min(right + 1, room));
    accept.n = accept.tokens.size();
    apply(accept);
    run_.drafted += request.drafts.size();
    run_.accepted += accept.n - 1;
    request.computed -= request.drafts.size() - (accept.n - 1);
    request.known = request.known.followed_by(accept.tokens);
    request.told = request.known.size();
    request.drafts = Tokens();
  }

  Config config_;
  const int external_;
  Draw draw_;
  VllmPolicy policy_;
  LabelBlocks labels_;
  const std::size_t most_running_;
  const std::int64_t budget_;
  const std::uint64_t zero_drafts_;  // of eight decodes
  std::deque<ServedRequest> waiting_;
  std::vector<ServedRequest> running_;
  std::vector<Tokens> seen_;
  std::int64_t arrived_ = 0;
  std::int64_t left_ = 0;
  VllmRun run_;
};

}  // namespace

VllmRun& VllmRun::operator+=(const VllmRun& other) {
  steps += other.steps;
  preemptions += other.preemptions;
  copies += other.copies;
  finished += other.finished;
  accepted += other.accepted;
  drafted += other.drafted;
  received += other.received;
  inner_states += other.inner_states;
  checks.hashed += other.checks.hashed;
  checks.states += other.checks.states;
  checks.kv += other.checks.kv;
  finding = other.finding;
  return *this;
}

std::string VllmRun::text() const {
  return fmt::format(
      "{} steps, {} requests finished, {} preemptions, {} block copies, {} of {} drafts accepted, "
      "{} tokens received, {} states inside chunks; "
      "{} keyed blocks, {} first states and the KV of {} tokens compared",
      steps, finished, preemptions, copies, accepted, drafted, received, inner_states,
      checks.hashed, checks.states, checks.kv);
}

Config drawn_vllm_config(std::uint64_t seed, std::uint64_t stream) {
  Draw draw(seed, stream);
  Config config;
  config.put("block", kBlock);
  config.put("hash_block", draw.chance(1, 2) ? kBlock : 4);
  config.drafts = draw.between(0, 3);
  config.put("eagle", draw.chance(1, 2) ? 0 : draw.between(1, 2));
  config.put("retention", draw.chance(1, 2) ? "none" : "0");
  std::string groups = fmt::format("attention:{}", kBlock);
  for (std::int64_t i = draw.between(1, 3); i > 0; --i) groups += fmt::format(",mamba:{}", kBlock);
  config.put("groups", groups);
  config.put("blocks", draw.chance(1, 2) ? draw.between(70, 100) : draw.between(100, 400));
  return config;
}

VllmRun run_vllm_server(const Config& config, std::uint64_t seed, std::uint64_t stream,
                        std::int64_t steps, const Defect* defect, int external) {
  return VllmServer(config, seed, stream, defect, external).run(steps);
}

}  // namespace lockstep::testing_support
