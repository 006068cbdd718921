// What a random trace draws before its first operation: the configuration of the caches and how
// often each thing happens, with some things switched off altogether. Features that crowd each
// other out in an average mix meet in some of the swarm (Groce, Zhang, Eide, Chen, Regehr 2012,
// "Swarm testing").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reference/base/philox.hpp"
#include "reference/protocol/subject.hpp"
#include "reference/protocol/tokens.hpp"

namespace lockstep::cache_sim {

/// The random numbers of one trace: a pure function of (seed, stream, index).
class Draw {
 public:
  Draw(std::uint64_t seed, std::uint64_t stream) : seed_(seed), stream_(stream) {}

  /// 0 … bound - 1; bound >= 1.
  std::uint64_t below(std::uint64_t bound) { return random_below(bound, seed_, stream_, index_++); }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low) + 1));
  }
  bool chance(std::uint64_t times, std::uint64_t of) { return below(of) < times; }
  /// A number beside the others, one for each `which`: none of those changes where it is drawn.
  std::uint64_t aside(std::uint64_t bound, std::uint64_t which) const {
    return random_below(bound, seed_, stream_, ~which);
  }

 private:
  std::uint64_t seed_;
  std::uint64_t stream_;
  std::uint64_t index_ = 0;
};

/// Weights are relative to each other, 0: never. Rates are of ten.
struct Swarm {
  Config config;
  bool scheduled = false;  ///< requests to the scheduler instead of single operations
  bool blocks = false;     ///< the cache has blocks and steps: a look-up holds nothing
  std::int64_t block = 0;  ///< tokens of these
  int operations = 60;     ///< or requests, where scheduled
  // What happens next.
  int request = 9, tree = 8, evict = 1, check = 1, flush = 0, slots = 0;
  // What happens to a request.
  int extend = 8, checkpoint = 3, finish = 3, abort = 1, preempt = 1;
  // Of ten.
  int shared = 7;     ///< prompts that begin like an earlier one
  int drafts = 2;     ///< extends that verify drafts
  int salted = 1;     ///< of forty
  int discarded = 2;  ///< finishes that leave nothing in the cache
  int urgent = 0;     ///< requests that go before others
  int bad = 0;        ///< of forty: operations that are bad input
  // How large.
  int running = 4;    ///< requests at once
  int longest = 24;   ///< tokens of a prompt
  int piece = 9;      ///< tokens that a prompt has beyond its shared part
  int documents = 2;  ///< that prompts are made of: few are hot, many are cold
  int letters = 0;    ///< or so many different tokens, so that anything looks like anything; 0: no
  int sessions = 0;   ///< that requests belong to and that are closed
  bool by_length = false;  ///< some requests end by the length of their output
  int sent = 0;            ///< of ten requests: another server has computed a part
  int images = 0;          ///< of ten requests: parts of the prompt are images
  int keyed = 0;           ///< of ten requests: an adapter, or images with names
  bool rooms = false;      ///< some admissions and evictions carry room=
  int turns = 0;           ///< of ten: decoding requests that are told their session's next turn
  int meetings = 0;        ///< of ten: requests of one prompt meet around a block
  // Of ten, where the subjects take a server's fields.
  int trees = 0;   ///< verifications of trees
  int cuts = 0;    ///< ends inside an accepted run
  int padded = 0;  ///< forwards of captured graphs
  // What happens to a sequence, where the subjects have its verbs; `sequences`: of ten operations.
  int sequences = 0;
  int clone = 3, truncate = 3, capture = 2, restore = 2, together = 3;
};

/// One of several things, as often as their weights say.
template <std::size_t N>
std::size_t pick(Draw& draw, const std::array<int, N>& weights) {
  std::uint64_t sum = 0;
  for (const int weight : weights) sum += static_cast<std::uint64_t>(weight);
  std::uint64_t at = draw.below(sum);
  std::size_t i = 0;
  while (at >= static_cast<std::uint64_t>(weights[i]))
    at -= static_cast<std::uint64_t>(weights[i++]);
  return i;
}

/// Tokens of a document, or of a few letters where the swarm has them.
Tokens drawn_tokens(const Swarm& swarm, Draw& draw, std::int64_t size);

/// Often a prefix of one of `seen`, and something after it.
Tokens drawn_prompt(const Swarm& swarm, Draw& draw, const std::vector<Tokens>& seen);

/// What all subjects of a search accept, so that a difference between them is a defect.
struct Accepted {
  ConfigFields fields;     ///< of the configuration, besides those that every policy honours
  bool has_states = true;  ///< one of them keeps states
  Capabilities capabilities;
  bool rooms = true;  ///< admissions and evictions may carry room=, as SGLang's scheduler asks it
  bool can(Capability capability) const { return capabilities.contains(capability); }
};
Accepted accepted_by(const PolicyEntry& policy);
/// What both accept. Tree verbs mean another thing to a policy without states.
Accepted accepted_by_both(const Accepted& one, const Accepted& other);

/// What a swarm is for.
enum class SwarmLevel : std::uint8_t { either, operations, requests };

/// Draws a swarm within what is accepted. The `fixed` fields of `base`, and those that differ from
/// their defaults, stay as they are there.
Swarm draw_swarm(Draw& draw, const Accepted& accepted, const Config& base, ConfigFields fixed = {},
                 SwarmLevel level = SwarmLevel::either);

}  // namespace lockstep::cache_sim
