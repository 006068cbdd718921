// Searches with numbers in the slots of a policy.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cache_sim/search/explore.hpp"

namespace lockstep::testing_support {

/// A search of one policy whose every trace has that fidelity and model (empty: the usual one).
/// `numbers-alone` is a fidelity of these tests: nobody listens to labels, so that a run goes on
/// after a wrong one. Nothing is found where a trace is bad input for the damaged policy.
cache_sim::ExploreOutcome searched_with_numbers(cache_sim::RunOptions run,
                                                const std::string& fidelity,
                                                const std::string& model, std::uint64_t seed,
                                                std::int64_t traces);

/// The policies whose slots can hold numbers, and the defects of these.
std::vector<std::string> policies_with_numbers();
std::vector<std::string> defects_with_numbers();

/// By defect, its row in properties/cache_sim/numbers/defects.txt: `number` where numbers alone
/// find the defect, so a forward reads what it spoils; `-` where it loses or keeps memory, locks,
/// an order or reuse, which the auditor or the oracle finds, where the damaged policy stops itself
/// first, or where so few traces do not read what it spoils; `endless` where no auditor stops the
/// damaged policy; `rowless` where it tells no row of what it spoils.
std::map<std::string, std::string> rows_of_defects();

/// The traces whose texts have 9,000 to 58,300 tokens, and the policy of each.
const std::map<std::string, std::string>& long_traces();

/// The models that a policy can have.
std::vector<std::string> models_of(const std::string& policy);

/// `number` where numbers alone, of a fidelity without labels, find the defect, `-` where they do
/// not.
std::string row_of_matrix(const std::string& defect, const std::string& fidelity = "numbers-alone");

/// A finding of a number under right labels, of the damaged policy; empty where there is none.
std::string number_that_labels_call_right(const std::string& defect,
                                          const std::string& fidelity = "reference",
                                          std::int64_t traces = 300);

}  // namespace lockstep::testing_support
