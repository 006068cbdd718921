// The wrong labels that explain wrong numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "cache_sim/model/label_state.hpp"
#include "reference/base/finding.hpp"
#include "reference/protocol/forward.hpp"

namespace lockstep::cache_sim {

// Labels are held to their tokens where a state is advanced and where a structure is audited;
// numbers show each use.

/// A part of the row's state whose label is not that of the tokens before it.
std::optional<Finding> wrong_state_label(const LabelState& labels, const ForwardRow& row);

/// Of a row, `read`, whose state has this wrong label, and whose numbers have the bits `of` another
/// run nevertheless: a fault of the harness itself.
Finding number_agrees(std::string_view read, const Finding& wrong_label, std::string_view of);

/// The first of these KV slots, by place of the text, whose label is not that of its token.
std::optional<Finding> wrong_kv_label(const LabelState& labels, const Tokens& text, KvSlots slots,
                                      std::span<const std::uint32_t> layers);

}  // namespace lockstep::cache_sim
