#include "properties/cache_sim/search/exhaustion.hpp"

#include <fmt/format.h>

#include <memory>
#include <vector>

#include "cache_sim/check/session.hpp"
#include "cache_sim/replay/replay.hpp"
#include "cache_sim/search/operation_player.hpp"
#include "cache_sim/trace/trace_writer.hpp"
#include "properties/support/search.hpp"
#include "reference/base/require.hpp"

namespace lockstep::testing_support {
namespace {

using namespace cache_sim;

/// Larger pools are not filled: one prompt takes all of the KV, and each slot is an operation.
constexpr std::int64_t kMostExhausted = std::int64_t{1} << 20;

Step step_of(const std::string& line) {
  const Result<Line> parsed = parse_line(line);
  require(parsed.has_value(), "a test's line is one");
  const Result<Operation> operation = parse_operation(*parsed);
  require(operation.has_value(), operation ? "" : operation.error().text);
  Step step;
  step.statement.what = *operation;
  return step;
}

/// An extend by all that is left, with `more` tokens after it.
Step extend_by_all(const std::string& id, const std::string& more) {
  Step step = step_of("extend id=" + id + " n=1" + (more.empty() ? "" : " tokens=" + more));
  step.rest = 0;
  return step;
}

/// Everything that two requests can do. Their prompts share a token, and one goes on where the
/// other one's output ends.
std::vector<Step> small_alphabet() {
  std::vector<Step> all;
  for (const char* const line :
       {"admit id=r tokens=a2", "admit id=q tokens=a1+b2", "extend id=r n=1", "checkpoint id=r",
        "checkpoint id=q", "finish id=r", "finish id=q", "finish id=r insert=0", "abort id=q",
        "preempt id=r", "evict kv=1 state=0", "evict kv=0 state=1", "match tokens=a1", "flush"})
    all.push_back(step_of(line));
  all.push_back(extend_by_all("r", ""));
  all.push_back(extend_by_all("q", ""));
  all.push_back(extend_by_all("r", "a2:3"));
  return all;
}

/// Everything that two requests and a host tier can do with a prefix, which both continue.
std::vector<Step> tier_alphabet() {
  std::vector<Step> all;
  for (const char* const line :
       {"admit id=r tokens=a4", "admit id=q tokens=a2+b1", "checkpoint id=r", "finish id=r",
        "finish id=q", "abort id=r", "evict kv=1", "evict kv=0 state=1", "evict tier=host kv=1",
        "evict tier=host kv=0 state=1", "land tier=host", "land tier=device", "settle"})
    all.push_back(step_of(line));
  for (const char* const id : {"r", "q"}) all.push_back(extend_by_all(id, ""));
  return all;
}

/// The prefix is being copied to the host, or there on both tiers, or on the host alone, or its end
/// is, or a load of it is under way.
std::vector<std::vector<Step>> tier_histories() {
  std::vector<Step> stored{step_of("admit id=z tokens=a2"), extend_by_all("z", ""),
                           step_of("finish id=z")};
  const auto then = [](std::vector<Step> steps, std::initializer_list<const char*> lines) {
    for (const char* const line : lines) steps.push_back(step_of(line));
    return steps;
  };
  const std::vector<Step> twice = then(stored, {"land tier=host", "settle"});
  const std::vector<Step> away = then(twice, {"evict kv=2"});
  std::vector<Step> longer = then(twice, {"admit id=y tokens=a3"});
  longer.push_back(extend_by_all("y", ""));
  longer = then(longer, {"finish id=y", "land tier=host", "settle", "evict kv=1"});
  return {stored, twice, away, longer, then(away, {"admit id=y tokens=a2+c1"})};
}

/// Everything that two requests and their transfers can do.
std::vector<Step> transfer_alphabet() {
  std::vector<Step> all;
  for (const char* const line :
       {"admit id=r tokens=a3", "admit id=q tokens=a2+b1", "extend id=r n=1", "checkpoint id=r",
        "load id=r", "load id=q", "land tier=decode", "land tier=decode id=q", "fail tier=decode",
        "settle", "finish id=r", "abort id=r", "preempt id=q", "evict kv=1 state=1"})
    all.push_back(step_of(line));
  for (const char* const id : {"r", "q"}) all.push_back(extend_by_all(id, ""));
  return all;
}

/// Nothing; a request of which a part, or all, has been sent; and two that have been computed.
std::vector<std::vector<Step>> transfer_histories() {
  const std::vector<Step> part{step_of("admit id=r tokens=a3"), step_of("extend id=r n=1"),
                               step_of("load id=r")};
  std::vector<Step> whole = part;
  for (const char* const line : {"extend id=r n=1", "load id=r"}) whole.push_back(step_of(line));
  std::vector<Step> both{step_of("admit id=r tokens=a3"), step_of("admit id=q tokens=a2+b1")};
  for (const char* const id : {"r", "q"}) both.push_back(extend_by_all(id, ""));
  return {{}, part, whole, both};
}

std::unique_ptr<ReplaySession> started(const RunOptions& options) {
  Result<std::unique_ptr<ReplaySession>> run = ReplaySession::start(options);
  require(run.has_value(), run ? "" : run.error().text);
  return std::move(*run);
}

std::string shown(const Config& config, OperationPlayer& player, const LocatedFinding& finding) {
  Trace trace;
  trace.config = config;
  for (const Step& step : player.played()) trace.statements.push_back(step.statement);
  return fmt::format("{}: {}\n{}", to_string(finding.finding.kind), finding.finding.text,
                     trace_text(trace));
}

class ShortTraces {
 public:
  ShortTraces(RunOptions options, int most) : options_(std::move(options)), most_(most) {
    const PolicyEntry* const policy = Registry<PolicyEntry>::find(options_.subjects.front());
    if (policy != nullptr && policy->capabilities.contains(Capability::disaggregation))
      for (const char* const line : {"load id=r", "load id=q", "land tier=decode", "settle"})
        alphabet_.push_back(step_of(line));
    // A block cache knows no tree; its steps decide what may be used.
    if (options_.config.text("groups").empty()) return;
    for (const char* const line : {"step", "extend id=q n=1"}) alphabet_.push_back(step_of(line));
  }
  ShortTraces(RunOptions options, int most, std::vector<Step> alphabet)
      : options_(std::move(options)), most_(most), alphabet_(std::move(alphabet)) {}

  /// The traces that begin with this history, which does not count as a part of `most`, and those
  /// of earlier calls.
  Exhausted all(const std::vector<Step>& history = {}) {
    history_ = &history;
    extend({});
    return exhausted_;
  }

 private:
  /// Every legal trace that begins so.
  void extend(const std::vector<const Step*>& before) {
    if (static_cast<int>(before.size()) == most_) return;
    for (const Step& step : alphabet_) {
      std::vector<const Step*> trace = before;
      trace.push_back(&step);
      if (is_legal(trace)) extend(trace);
      if (!exhausted_.finding.empty()) return;
    }
  }

  bool is_legal(const std::vector<const Step*>& trace) {
    const std::unique_ptr<ReplaySession> run = started(options_);
    OperationPlayer player(*run);
    for (const Step& step : *history_) player.play(step);
    const Reply* last = nullptr;
    for (const Step* const step : trace) last = player.play(*step);
    const bool legal = last != nullptr;
    if (legal && last->refused != Refusal::none) ++exhausted_.refusals;
    if (legal) player.play(step_of("check"));
    run->conclude();
    if (legal) ++exhausted_.traces;
    if (!run->findings().empty())
      exhausted_.finding = shown(options_.config, player, run->findings().front());
    return legal;
  }

  RunOptions options_;
  int most_;
  std::vector<Step> alphabet_ = small_alphabet();
  const std::vector<Step>* history_ = nullptr;
  Exhausted exhausted_;
};

/// The replies to a fixture, operation by operation; nothing where it is not for one rank of
/// policies with an oracle.
struct Recording {
  RunOptions options;
  std::vector<Operation> operations;
};

Recording recorded(const std::string& file) {
  Recording recording;
  ReplayRequest request;
  request.file = file;
  request.watch = [&](const Operation& operation, const Reply&) {
    recording.operations.push_back(operation);
  };
  const Result<ReplayOutcome> outcome = replay(request);
  require(outcome.has_value(), outcome ? "" : outcome.error().text);
  recording.options = outcome->run->options();
  recording.options.watch = nullptr;
  recording.options.skip_illegal = true;
  const Config& config = recording.options.config;
  if (recording.options.subjects.size() != 2 || config.ranks != 1 ||
      config.kv_tokens > kMostExhausted || config.state_slots > kMostExhausted)
    recording.operations.clear();
  return recording;
}

/// Takes what is free away, and gives it back.
class Hog {
 public:
  explicit Hog(OperationPlayer& player) : player_(player) {}

  void take(Short what) {
    say("evict kv=1000000 state=1000000");
    const Reply* const left = say("check");
    const std::int64_t kv = left == nullptr ? 0 : left->get(ReplyField::kv_free);
    if (what != Short::of_states && kv > 0 &&
        say(fmt::format("admit id=hog tokens=hog{}", kv)) != nullptr) {
      Step all = extend_by_all("hog", "");
      player_.play(all);
    }
    slots_ = 0;
    for (; what != Short::of_kv; ++slots_) {
      const Reply* const slot = say(fmt::format("alloc as=hog{}", slots_));
      if (slot == nullptr || slot->refused != Refusal::none) return;
    }
  }
  void give_back() {
    say("abort id=hog");
    for (int i = 0; i < slots_; ++i) say(fmt::format("free slot=hog{}", i));
  }

 private:
  const Reply* say(const std::string& line) { return player_.play(step_of(line)); }

  OperationPlayer& player_;
  int slots_ = 0;
};

}  // namespace

Exhausted all_short_traces(const std::string& policy, int most) {
  RunOptions options;
  options.subjects = {policy, "oracle:" + policy};
  options.skip_illegal = true;
  Config& config = options.config;
  config.kv_tokens = 4;
  config.model_chunk = 1;
  config.chunked_prefill = 2;
  config.max_running = 2;
  if (policy.starts_with("vllm")) {
    config.put("groups", "attention:2,mamba:2");
    config.put("hash_block", 1);
    config.put("blocks", 6);
  }
  if (policy == "sglang-extra-buffer") config.put("track_interval", 1);
  if (policy != "radix") config.state_slots = 3;
  if (policy.starts_with("marconi"))
    for (const char* const bytes : {"token_bytes", "state_bytes"}) config.put(bytes, 1);
  return ShortTraces(std::move(options), most).all();
}

Exhausted all_copies(const std::string& write_policy, const std::string& defect, int most) {
  RunOptions options = defect.empty() ? RunOptions{} : run_with_defect(defect);
  if (defect.empty()) options.subjects = {"sglang-no-buffer", "oracle:sglang-no-buffer"};
  options.skip_illegal = true;
  Config& config = options.config;
  config.kv_tokens = 5;
  config.state_slots = 3;
  config.model_chunk = 1;
  config.max_running = 2;
  config.put("host_kv", 5);
  config.put("host_states", 1);
  config.put("write_policy", write_policy);
  ShortTraces traces(std::move(options), most, tier_alphabet());
  Exhausted all;
  for (const std::vector<Step>& history : tier_histories())
    if (all = traces.all(history); !all.finding.empty()) break;
  return all;
}

Exhausted all_transfers(const std::string& defect, int most) {
  RunOptions options = defect.empty() ? RunOptions{} : run_with_defect(defect);
  if (defect.empty()) options.subjects = {"sglang-pd", "oracle:sglang-pd"};
  options.skip_illegal = true;
  Config& config = options.config;
  config.kv_tokens = 5;
  config.state_slots = 4;
  config.model_chunk = 1;
  config.max_running = 2;
  config.put("decode_states", 1);
  config.put("slices", 2);
  config.put("draft_model", "decode");
  ShortTraces traces(std::move(options), most, transfer_alphabet());
  Exhausted all;
  for (const std::vector<Step>& history : transfer_histories())
    if (all = traces.all(history); !all.finding.empty()) break;
  return all;
}

namespace {

/// Ends every request, lock and slot that is still held; an end of something that is not held is
/// bad input and left out.
void end_everything(const std::vector<Operation>& operations, OperationPlayer& player) {
  for (const Operation& operation : operations) {
    Step end;
    Operation gives_back;
    gives_back.id = operation.id;
    gives_back.slot = gives_back.lock = operation.as;
    switch (operation.verb) {
      case Verb::admit: gives_back.verb = Verb::abort; break;
      case Verb::alloc:
      case Verb::fork: gives_back.verb = Verb::free; break;
      case Verb::lock: gives_back.verb = Verb::unlock; break;
      default: continue;
    }
    end.statement.what = gives_back;
    player.play(end);
  }
  for (const char* const line : {"flush", "check"}) player.play(step_of(line));
}

}  // namespace

Exhausted each_allocation_failing(const std::string& file, Short what, std::size_t step) {
  const Recording recording = recorded(file);
  Exhausted exhausted;
  for (std::size_t n = 0; n < recording.operations.size(); n += step) {
    const std::unique_ptr<ReplaySession> run = started(recording.options);
    OperationPlayer player(*run);
    Hog hog(player);
    for (std::size_t i = 0; i < recording.operations.size() && !run->stopped(); ++i) {
      if (i == n) hog.take(what);
      Step one;
      one.statement.what = recording.operations[i];
      const Reply* const reply = player.play(one);
      if (i != n) continue;
      if (reply != nullptr && reply->refused != Refusal::none) ++exhausted.refusals;
      hog.give_back();
    }
    if (!run->stopped()) end_everything(recording.operations, player);
    run->conclude();
    ++exhausted.traces;
    if (run->findings().empty()) continue;
    exhausted.finding = shown(recording.options.config, player, run->findings().front());
    return exhausted;
  }
  return exhausted;
}

}  // namespace lockstep::testing_support
