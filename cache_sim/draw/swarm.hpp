// What a random trace draws before its first operation: the configuration of the caches and how
// often each thing happens, with some things switched off altogether. Features that crowd each
// other out in an average mix meet in some of the swarm (Groce, Zhang, Eide, Chen, Regehr 2012,
// "Swarm testing"). A family of policies draws its own part in a file beside them (SwarmEntry).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "cache_sim/draw/draw.hpp"
#include "reference/base/require.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/subject.hpp"

namespace lockstep::cache_sim {

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
  int apart = 3;      ///< of ten requests: some steps go by before the next one comes
  int sessions = 0;   ///< that requests belong to and that are closed
  bool by_length = false;  ///< some requests end by the length of their output
  int sent = 0;            ///< of ten requests: another server has computed a part
  int images = 0;          ///< of ten requests: parts of the prompt are images
  int keyed = 0;           ///< of ten requests: an adapter, or images with names
  bool rooms = false;      ///< some admissions and evictions carry room=
  int turns = 0;           ///< of ten: decoding requests that are told their session's next turn
  int meetings = 0;        ///< of ten: requests of one prompt meet around a block
  int overhangs = 0;       ///< of ten: prompts that came before, up to one token behind a block
  std::int64_t overhang_block = 1;  ///< tokens of such a block
  // Of ten, where the subjects take them.
  int trees = 0;   ///< verifications of trees
  int cuts = 0;    ///< ends inside an accepted run
  int padded = 0;  ///< forwards of captured graphs
  // What happens to a sequence, where the subjects have its verbs; `sequences`: of ten operations.
  int sequences = 0;
  int clone = 3, truncate = 3, capture = 2, restore = 2, together = 3;
};

/// What all subjects of a search accept, so that a difference between them is a defect.
struct Accepted {
  ConfigFields fields;     ///< of the configuration, besides those that every policy honours
  bool has_states = true;  ///< one of them keeps states
  Capabilities capabilities;
  bool has_child = false;  ///< which need know only what a server of any kind has
  bool can(Capability capability) const { return capabilities.contains(capability); }
};
/// Sets one field where the subjects have it and nobody has fixed it.
class ConfigDraw {
 public:
  /// `config` must outlive this; what differs from its default there is fixed too.
  ConfigDraw(ConfigFields accepted, ConfigFields fixed, Config& config)
      : accepted_(std::move(accepted)), config_(config), fixed_(std::move(fixed)) {
    for (const std::string& field : config.changed()) fixed_.add(field);
  }

  bool free(std::string_view field) const { return !fixed_.contains(field); }
  bool has(std::string_view field) const { return accepted_.contains(field); }
  /// A common field, which every policy honours.
  void common(std::string_view field, std::int64_t value) {
    if (free(field))
      require(config_.set(field, std::to_string(value)).has_value(), "a drawn value is in range");
  }
  /// A field that the subjects may have.
  void optional(std::string_view field, std::int64_t value) {
    if (has(field)) common(field, value);
  }

 private:
  ConfigFields accepted_;
  Config& config_;
  ConfigFields fixed_;
};

/// One swarm as it is drawn.
struct SwarmDraw {
  Draw& draw;  ///< whose streams a family takes
  const Accepted& accepted;
  ConfigDraw& fields;
  Swarm& swarm;
  std::int64_t scale = 1;  ///< of all sizes
};

/// A family's part of a swarm, registered beside its policies. Each step may be null.
struct SwarmEntry {
  std::string_view name;
  /// Whether the subjects of the search are of the family.
  bool (*applies)(const Accepted&);
  /// Its options, after the pools and the common fields.
  void (*configure)(SwarmDraw&) = nullptr;
  /// Its scheduler, after it was drawn whether there are requests or single operations.
  void (*schedule)(SwarmDraw&) = nullptr;
  /// How often its things happen, after everything else.
  void (*rate)(SwarmDraw&) = nullptr;
};

}  // namespace lockstep::cache_sim
