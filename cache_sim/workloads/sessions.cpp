// `sessions`: chats of several turns and sessions of agents, generated from a seed. Each request is
// a pure function of (seed, number), so the stream holds no state.
//
//   seats       sessions that are open at once; request i belongs to seat i mod seats
//   turns       requests of a session; then its seat begins a new one
//   systems     different system prompts, of `system` tokens on average, some used more often
//   input       tokens that a user or a tool adds in a turn, on average
//   output      tokens of an answer, on average
//   fork_every  0: a chat. Otherwise an agent: after this many turns, a sub-agent forks the
//               context and makes fork_turns requests; the session goes on without them
//   gap_us      microseconds between two requests of the workload
//   drafts      drafts of each verification; 0: none. With `ngram=1`: at most this many
//   accepted    per mille: the chance that a draft is kept if the one before it is
//   branches    the drafts are a tree in which each one has this many children
#include <fmt/format.h>

#include <array>

#include "cache_sim/base/parameters.hpp"
#include "cache_sim/workloads/workload.hpp"
#include "reference/base/philox.hpp"
#include "reference/protocol/speculation.hpp"

namespace lockstep::cache_sim {
namespace {

struct SessionsOptions {
  std::int64_t seed = 1;
  std::int64_t requests = 1000;
  std::int64_t seats = 32;
  std::int64_t turns = 8;
  std::int64_t systems = 16;
  std::int64_t system = 1024;
  std::int64_t input = 256;
  std::int64_t output = 128;
  std::int64_t fork_every = 0;
  std::int64_t fork_turns = 3;
  std::int64_t gap_us = 100'000;
  std::int64_t drafts = 0;
  std::int64_t accepted = 700;
  std::int64_t ngram = 0;
  std::int64_t branches = 1;

  /// The number of documents of a session: its own and those of its sub-agents.
  std::int64_t documents() const {
    return 1 + (fork_every == 0 ? 0 : turns / (fork_every + fork_turns) + 1);
  }
  std::int64_t sessions() const { return (requests / seats / turns + 1) * seats; }
};

/// The decisions that are drawn at random.
enum class Draw : std::uint64_t { system_size, system_first, system_second, input, output };
constexpr std::uint64_t kDraws = 5;
constexpr std::uint64_t kDraftStreams = std::uint64_t{1} << 62;  // after the streams of texts

/// A random number of tokens, uniform between half the mean and one and a half times the mean.
std::uint32_t around(std::int64_t mean, std::uint64_t seed, std::uint64_t stream,
                     std::uint64_t index) {
  const auto whole = static_cast<std::uint64_t>(mean);
  return static_cast<std::uint32_t>((whole + 1) / 2 +
                                    random_below(whole + 1 - whole % 2, seed, stream, index));
}

class SessionsStream final : public RequestStream {
 public:
  explicit SessionsStream(const SessionsOptions& options) : options_(options) {}

  Result<bool> next(RequestSpec& spec) override {
    if (number_ == options_.requests) return false;
    const std::int64_t round = number_ / options_.seats;
    const std::int64_t session = round / options_.turns * options_.seats + number_ % options_.seats;
    spec = request_of(session, round % options_.turns);
    spec.number = number_;
    spec.at = number_ * options_.gap_us * 1000;
    spec.branches = options_.branches;
    speculate(spec,
              {.kind = options_.ngram != 0 ? Speculation::Kind::ngram : Speculation::Kind::chain,
               .drafts = options_.drafts,
               .accepted = options_.accepted,
               .seed = seed()},
              kDraftStreams + static_cast<std::uint64_t>(number_));
    ++number_;
    return true;
  }

 private:
  /// The length of a text before the answer of `turn` (the turns before it, and its own input), and
  /// the length of that answer. A text is that of a session or of a sub-agent.
  struct Extent {
    std::uint32_t prompt = 0;
    std::uint32_t output = 0;
    std::uint32_t whole() const { return prompt + output; }
  };
  Extent extent(std::int64_t text, std::int64_t turn) const {
    Extent extent;
    for (std::int64_t i = 0; i <= turn; ++i) {
      extent.prompt += extent.output + around(options_.input, text, Draw::input, i);
      extent.output = around(options_.output, text, Draw::output, i);
    }
    return extent;
  }

  RequestSpec request_of(std::int64_t session, std::int64_t turn) const {
    const std::int64_t text = session * options_.documents();
    std::array<DocumentSlice, 3> slices{};
    std::size_t count = 0;
    const std::uint64_t system = system_of(session);
    slices[count++] = {kSessionDocuments + static_cast<Document>(system), 0, system_size(system)};
    std::uint32_t size = slices[0].size;
    std::int64_t main_turn = turn;
    std::int64_t fork = -1;
    std::int64_t fork_turn = 0;
    if (options_.fork_every != 0) {
      const std::int64_t cycle = options_.fork_every + options_.fork_turns;
      const std::int64_t place = turn % cycle;
      const bool forked = place >= options_.fork_every;
      if (forked) fork = turn / cycle;
      main_turn = turn / cycle * options_.fork_every + (forked ? options_.fork_every - 1 : place);
      fork_turn = place - options_.fork_every;
    }
    const Extent main = extent(text, main_turn);
    slices[count++] = {document_of(text), 0, main.whole()};
    Extent last = main;
    if (fork >= 0) {
      size += main.whole();
      last = extent(text + 1 + fork, fork_turn);
      slices[count++] = {document_of(text + 1 + fork), 0, last.whole()};
    }
    return {.session = Name::intern(fmt::format("s{}", session)),
            .tokens = Tokens::of_slices(std::span(slices).first(count)),
            .prompt_size = size + last.prompt};
  }

  /// The smaller one of two draws, so that some system prompts are used more often than others.
  std::uint64_t system_of(std::int64_t session) const {
    const auto draw = [&](Draw what) {
      return random_below(static_cast<std::uint64_t>(options_.systems), seed(),
                          static_cast<std::uint64_t>(what), static_cast<std::uint64_t>(session));
    };
    return std::min(draw(Draw::system_first), draw(Draw::system_second));
  }
  std::uint32_t system_size(std::uint64_t system) const {
    return lockstep::cache_sim::around(options_.system, seed(),
                                       static_cast<std::uint64_t>(Draw::system_size), system);
  }
  std::uint32_t around(std::int64_t mean, std::int64_t text, Draw what, std::int64_t turn) const {
    const std::uint64_t stream =
        static_cast<std::uint64_t>(text + 1) * kDraws + static_cast<std::uint64_t>(what);
    return lockstep::cache_sim::around(mean, seed(), stream, static_cast<std::uint64_t>(turn));
  }
  Document document_of(std::int64_t text) const {
    return kSessionDocuments + static_cast<Document>(options_.systems + text);
  }
  std::uint64_t seed() const { return static_cast<std::uint64_t>(options_.seed); }

  SessionsOptions options_;
  std::int64_t number_ = 0;
};

OpenedStream open(std::string_view text) {
  SessionsOptions options;
  const std::array known{Parameter{"seed", 0, kMostInteger, &options.seed},
                         Parameter{"requests", 1, 100'000'000, &options.requests},
                         Parameter{"seats", 1, 1 << 20, &options.seats},
                         Parameter{"turns", 1, 1 << 12, &options.turns},
                         Parameter{"systems", 1, 1 << 20, &options.systems},
                         Parameter{"system", 1, 1 << 20, &options.system},
                         Parameter{"input", 1, 1 << 20, &options.input},
                         Parameter{"output", 1, 1 << 20, &options.output},
                         Parameter{"fork_every", 0, 1 << 12, &options.fork_every},
                         Parameter{"fork_turns", 1, 1 << 12, &options.fork_turns},
                         Parameter{"gap_us", 1, 1'000'000'000, &options.gap_us},
                         Parameter{"drafts", 0, 1024, &options.drafts},
                         Parameter{"accepted", 0, 1000, &options.accepted},
                         Parameter{"ngram", 0, 1, &options.ngram},
                         Parameter{"branches", 1, 1024, &options.branches}};
  if (const Result<void> read = parse_parameters("sessions", text, known); !read)
    return tl::unexpected(read.error());
  const std::int64_t longest =
      2 * (options.system + options.turns * (options.input + options.output));
  if (longest > std::int64_t{Tokens::kMaxSize})
    return fail("sessions: turns of this size can make a prompt of more than 2^24 tokens");
  if (options.systems + options.sessions() * options.documents() > kMostSessionDocuments)
    return fail("sessions: there are more than 2^28 different texts");
  if (options.requests > kLatestTime / 1000 / options.gap_us)
    return fail("sessions: with this gap_us, the last request would come after 146 years");
  return std::make_unique<SessionsStream>(options);
}

const Registration<GeneratedWorkload> kSessions{
    {"sessions", "multi-turn chats, or agents with forks (fork_every), made from a seed",
     "seed=,requests=,seats=,turns=,systems=,system=,input=,output=,fork_every=,fork_turns=,gap_"
     "us=,drafts=,accepted=,ngram=,branches=",
     open}};

}  // namespace
}  // namespace lockstep::cache_sim
