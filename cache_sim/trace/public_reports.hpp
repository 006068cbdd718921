// Public bug reports that the comments of traces cite.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reference/base/registry.hpp"

namespace lockstep::cache_sim {

/// A project whose reports comments cite by number. A family of policies registers its server's
/// project.
struct PublicProject {
  std::string_view name;          ///< in lower case, as a word of a comment
  std::string_view repository{};  ///< `owner/name` on GitHub; empty: unknown
};

/// The reports that a trace's description cites, such as `pytorch #12345`, in order of appearance.
/// A number alone belongs to the project that was named last.
std::vector<std::string> public_references(const std::vector<std::string>& description);

/// The address of one of these reports in its project's list of issues, which redirects to a pull
/// request of that number. Empty if the project or its repository is not known.
std::string reference_url(const std::string& reference);

}  // namespace lockstep::cache_sim
