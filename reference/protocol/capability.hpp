// Capabilities: the parts of the operations' grammar that a subject may or may not understand. Each
// verb and each field names the one that it needs (reference/protocol/operation.cpp); what several
// subjects understand together is `a & b`.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "reference/protocol/enum_set.hpp"

namespace lockstep {

enum class Capability : std::uint8_t {
  request,         ///< the request verbs; every subject has them
  tree,            ///< match … free: operations on a radix tree
  slots,           ///< capture, restore, compact: rows of a slot cache
  sequences,       ///< clone, truncate: requests are sequences of one memory
  transfers,       ///< admit external=, extend n=0: tokens that another server has computed
  content_keys,    ///< admit lora=, images=: KV and states depend on more than the tokens
  draft_trees,     ///< extend parents=: verifications of trees
  partial_finish,  ///< finish up_to=: ends inside an accepted run
  tiers,           ///< land, settle, evict tier=: a second memory, and copies to and from it
  disaggregation,  ///< load, land id=: one server computes a prompt, another one goes on from it
};
inline constexpr std::size_t kCapabilityCount =
    static_cast<std::size_t>(Capability::disaggregation) + 1;
using Capabilities = EnumSet<Capability>;

std::string_view to_string(Capability capability);
/// The end of the sentence about a subject that lacks the capability: "has no sequence verbs".
std::string_view lack_of(Capability capability);

/// A word with which a child says in its answer to `hello` what it understands, and the field where
/// the word stands: `levels=request,tree takes=external`.
struct CapabilityWord {
  std::string_view field;
  std::string_view word;
  Capabilities means;
};
inline constexpr CapabilityWord kCapabilityWords[] = {
    {"levels", "request", {Capability::request}},
    {"levels", "tree", {Capability::tree}},
    {"levels", "sequence", {Capability::sequences}},
    {"takes", "external", {Capability::transfers}},
    {"takes", "keys", {Capability::content_keys}},
    {"takes",
     "server",
     {Capability::transfers, Capability::draft_trees, Capability::partial_finish}},
    {"takes", "tiers", {Capability::tiers}},
    {"takes", "disaggregation", {Capability::tiers, Capability::disaggregation}},
};
/// The capabilities of a list of words such as `external,keys`; nullopt where a word is unknown or
/// stands twice.
std::optional<Capabilities> capabilities_of_words(std::string_view field, std::string_view list);

}  // namespace lockstep
