// The words of the grammar as lists, for whoever compares them with a page that describes them.
#pragma once

#include <string_view>
#include <vector>

#include "reference/protocol/operation.hpp"

namespace lockstep {

struct FieldName {
  std::string_view name;
  bool required;
};

/// The fields of an operation's line, sorted by name.
std::vector<FieldName> fields_of(Verb verb);

/// The fields of its answer: first those that it must carry where it is no refusal. What its
/// evictions cost (evicted_kv, evicted_states) any answer can carry.
std::vector<FieldName> answer_fields_of(Verb verb);

}  // namespace lockstep
