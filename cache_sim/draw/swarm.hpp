// The random choices before a trace's first operation: the configuration of the caches and how
// often each thing happens, with some things switched off altogether. Features that crowd each
// other out in an average mix meet in some of the swarm (Groce, Zhang, Eide, Chen, Regehr 2012,
// "Swarm testing"). A family of policies draws its own part in a file beside its policies
// (SwarmEntry).
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

/// Weights are relative to each other; a weight of 0 means never. Rates are of ten, unless they say
/// otherwise.
struct Swarm {
  Config config;
  bool scheduled = false;  ///< requests to the scheduler instead of single operations
  bool blocks = false;     ///< the cache has blocks and steps, and a look-up locks nothing
  std::int64_t block = 0;  ///< tokens of a block
  int operations = 60;     ///< or requests, if scheduled
  // Weights of the next operation.
  int request = 9, tree = 8, evict = 1, check = 1, flush = 0, slots = 0;
  // Weights of the next operation on a request.
  int extend = 8, checkpoint = 3, finish = 3, abort = 1, preempt = 1;
  // Rates.
  int shared = 7;     ///< prompts that begin like an earlier one
  int drafts = 2;     ///< extends that verify drafts
  int salted = 1;     ///< of forty: prompts with a salt
  int discarded = 2;  ///< finishes that leave nothing in the cache
  int urgent = 0;     ///< requests with a raised priority
  int bad = 0;        ///< of forty: operations that are bad input
  // Sizes.
  int running = 4;    ///< requests that run at once
  int longest = 24;   ///< tokens of the longest prompt
  int piece = 9;      ///< tokens that a prompt has beyond its shared part
  int documents = 2;  ///< documents that prompts are made of; the first ones are used most
  /// if not 0, prompts are made of this many different tokens, so that most sequences share
  /// something
  int letters = 0;
  int apart = 3;           ///< of ten requests: some steps go by before the next one comes
  int sessions = 0;        ///< sessions that requests belong to, which are closed at times
  bool by_length = false;  ///< some requests end by the length of their output
  int sent = 0;            ///< requests of which another server has computed a part
  int images = 0;          ///< requests whose prompt contains images
  int keyed = 0;           ///< requests with an adapter, or with images that have names
  bool rooms = false;      ///< some admissions and evictions carry room=
  int turns = 0;           ///< decoding requests that are told the next turn of their session
  int meetings = 0;        ///< requests that share a prompt and reach the end of a block together
  int overhangs = 0;       ///< of ten: prompts that came before, up to one token beyond a block
  std::int64_t overhang_block = 1;  ///< tokens of such a block
  // Rates of operations that only some subjects take.
  int trees = 0;          ///< verifications of a tree of drafts
  int cuts = 0;           ///< finishes inside an accepted run of tokens
  int padded = 0;         ///< forwards of captured graphs, with rows of padding
  int copies = 0;         ///< weight of land, settle and evict tier=host among the next operations
  bool has_disk = false;  ///< behind the host: its copies, too, and refused admissions ask again
  int disk_ranks = 1;     ///< with disks of their own, on one of which a copy may fail alone
  bool prefetches = false;  ///< from the disk, for requests that wait, in two parts
  /// windows were asked for, and inserts back them up
  bool backs_windows_up = false;
  int moves = 0;  ///< loads of requests that the first of two servers still computes
  // Operations on sequences, for subjects that have these verbs; `sequences` is their rate.
  int sequences = 0;
  int clone = 3, truncate = 3, capture = 2, restore = 2, together = 3;
};

/// The features that all subjects of a search accept, so that a difference between their answers is
/// a defect.
struct Accepted {
  ConfigFields fields;     ///< config fields beyond those that every policy honours
  bool has_states = true;  ///< at least one subject keeps states
  Capabilities capabilities;
  bool has_child = false;  ///< children may not know operations that only some servers have
  bool can(Capability capability) const { return capabilities.contains(capability); }
};
/// Sets config fields that all subjects honour and that the user has not fixed.
class ConfigDraw {
 public:
  /// `config` must outlive this object. Its fields that differ from their defaults are fixed as
  /// well.
  ConfigDraw(ConfigFields accepted, ConfigFields fixed, Config& config)
      : accepted_(std::move(accepted)), config_(config), fixed_(std::move(fixed)) {
    for (const std::string& field : config.changed()) fixed_.add(field);
  }

  bool free(std::string_view field) const { return !fixed_.contains(field); }
  bool has(std::string_view field) const { return accepted_.contains(field); }
  /// Sets a common field, which every policy honours.
  void common(std::string_view field, std::int64_t value) {
    if (free(field))
      require(config_.set(field, std::to_string(value)).has_value(), "a drawn value is in range");
  }
  /// Sets a field that only some policies honour, if all subjects do.
  void optional(std::string_view field, std::int64_t value) {
    if (has(field)) common(field, value);
  }

 private:
  ConfigFields accepted_;
  Config& config_;
  ConfigFields fixed_;
};

/// A swarm while it is drawn: the arguments of a family's part.
struct SwarmDraw {
  Draw& draw;  ///< a family draws from named streams of it
  const Accepted& accepted;
  ConfigDraw& fields;
  Swarm& swarm;
  std::int64_t scale = 1;  ///< factor of all sizes
};

/// The part of a family of policies in a swarm, registered beside the policies. Each step may be
/// null.
struct SwarmEntry {
  std::string_view name;
  /// Whether the subjects of the search belong to the family.
  bool (*applies)(const Accepted&);
  /// Draws the family's options, after the pools and the common fields.
  void (*configure)(SwarmDraw&) = nullptr;
  /// Draws the family's scheduler, after the choice between requests and single operations.
  void (*schedule)(SwarmDraw&) = nullptr;
  /// Draws the rates of the family's operations, after everything else.
  void (*rate)(SwarmDraw&) = nullptr;
};

}  // namespace lockstep::cache_sim
