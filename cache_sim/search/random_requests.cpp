#include "cache_sim/search/random_requests.hpp"

#include <fmt/format.h>

#include <utility>

#include "cache_sim/workloads/workload.hpp"

namespace lockstep::cache_sim {
namespace {

/// Draws verifications until `output` tokens are sampled: for each, the drafts and how many are
/// kept.
void draw_verifications(Draw& draw, RequestSpec& spec) {
  for (std::int64_t sampled = 1; sampled < spec.output_size(); sampled += spec.accept.back()) {
    spec.drafts.push_back(draw.between(0, spec.branches == 1 ? 3 : 7));
    spec.accept.push_back(draw.between(1, spec.most_kept(spec.drafts.back())));
  }
}

/// Draws images as parts of the prompt, each a few tokens long, so that they fit an encoder with a
/// small budget.
void draw_images(Draw& draw, bool has_names, RequestSpec& spec) {
  std::int64_t at = draw.between(0, 4);
  for (std::int64_t size; (size = draw.between(1, 6)), at + size <= spec.prompt_size;
       at += size + draw.between(0, 3))
    spec.images.push_back(
        {static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(size),
         has_names ? Name::intern(std::string(1, static_cast<char>('h' + size))) : Name()});
}

/// Draws requests to the scheduler, one after another.
class RequestMaker {
 public:
  RequestMaker(const Swarm& swarm, Draw& draw) : swarm_(swarm), draw_(draw) {}

  std::vector<Statement> all() {
    for (int i = 0; i < swarm_.operations; ++i) {
      say(request(Name::intern(fmt::format("q{}", i))));
      const auto stop = pick<3>(draw_, {12, swarm_.abort * 2, swarm_.preempt * 2});
      if (stop != 0) say(intervention(stop == 2));
      if (!sessions_.empty() && draw_.chance(1, 6))
        say(CloseSession{sessions_[draw_.below(sessions_.size())]});
      if (sometimes(swarm_.apart)) say(some_run());
      if (draw_.chance(static_cast<std::uint64_t>(swarm_.evict), 12)) say(some_eviction());
    }
    say(RunStatement{});
    for (const Verb verb : {Verb::flush, Verb::check}) {
      Operation operation;
      operation.verb = verb;
      say(operation);
    }
    return std::move(statements_);
  }

 private:
  template <class What>
  void say(What what) {
    statements_.push_back(
        {.line = static_cast<int>(statements_.size()) + 1, .what = std::move(what)});
  }

  bool sometimes(int of_ten) {
    return of_ten != 0 && draw_.chance(static_cast<std::uint64_t>(of_ten), 10);
  }

  /// A time that is not before the time of an earlier line.
  Nanoseconds some_time() {
    if (!draw_.chance(1, 3)) return -1;
    return latest_ += draw_.between(0, 4) * swarm_.config.step_time;
  }
  Name some_session() {
    return Name::intern(
        fmt::format("c{}", draw_.below(static_cast<std::uint64_t>(swarm_.sessions))));
  }

  Intervention intervention(bool retracts) {
    Intervention stop{.retract = retracts, .id = ids_[draw_.below(ids_.size())], .at = some_time()};
    if (!retracts && stop.at < 0) stop.during = sometimes(swarm_.cuts);
    return stop;
  }

  RequestSpec request(Name id) {
    RequestSpec spec;
    spec.id = id;
    if (draw_.chance(static_cast<std::uint64_t>(swarm_.salted), 40)) spec.salt = Name::intern("s");
    if (sometimes(swarm_.keyed)) spec.lora = Name::intern(draw_.chance(1, 2) ? "l" : "m");
    const Tokens prompt = drawn_prompt(swarm_, draw_, seen_);
    spec.prompt_size = prompt.size();
    const std::int64_t output = draw_.between(1, swarm_.piece);
    spec.stops = !(swarm_.by_length && draw_.chance(1, 2));
    spec.tokens = prompt.followed_by(spec.stops ? drawn_tokens(swarm_, draw_, output)
                                                : output_of_length(output));
    spec.at = some_time();
    if (draw_.chance(static_cast<std::uint64_t>(swarm_.drafts), 10)) {
      if (sometimes(swarm_.trees)) spec.branches = draw_.between(2, 3);
      draw_verifications(draw_, spec);
      if (sometimes(swarm_.cuts)) spec.overrun = draw_.between(1, 2);
    }
    if (!swarm_.blocks && sometimes(swarm_.sent))
      spec.external = draw_.chance(1, 2) ? prompt.size() : draw_.between(1, swarm_.longest);
    if (sometimes(swarm_.images)) draw_images(draw_, sometimes(swarm_.keyed), spec);
    if (draw_.chance(static_cast<std::uint64_t>(swarm_.urgent), 10))
      spec.priority = draw_.between(1, 2);
    if (swarm_.sessions != 0 && draw_.chance(1, 2)) {
      spec.session = some_session();
      sessions_.push_back(spec.session);
    }
    if (swarm_.config.ranks > 1 && draw_.chance(1, 4))
      spec.rank = draw_.between(0, swarm_.config.ranks - 1);
    // other outputs have tokens that no line can name
    seen_.push_back(spec.stops ? spec.tokens : prompt);
    ids_.push_back(spec.id);
    return spec;
  }

  /// The output that a reader of the trace makes of this length.
  Tokens output_of_length(std::int64_t size) const {
    const auto number = static_cast<Document>(statements_.size());
    return Tokens::of_document(kOutputDocuments + number, 0, static_cast<std::uint32_t>(size));
  }

  RunStatement some_run() {
    if (!draw_.chance(1, 3)) return {.steps = draw_.between(1, 6)};
    return {.until = latest_ += draw_.between(0, 5) * swarm_.config.step_time};
  }

  Operation some_eviction() {
    Operation evict;
    evict.verb = Verb::evict;
    evict.kv = draw_.between(0, swarm_.longest);
    evict.state = draw_.between(0, 2);
    return evict;
  }

  const Swarm& swarm_;
  Draw& draw_;
  std::vector<Statement> statements_;
  std::vector<Tokens> seen_;
  std::vector<Name> ids_;
  std::vector<Name> sessions_;
  Nanoseconds latest_ = 0;
};

}  // namespace

std::vector<Statement> random_requests(const Swarm& swarm, Draw& draw) {
  return RequestMaker(swarm, draw).all();
}

}  // namespace lockstep::cache_sim
