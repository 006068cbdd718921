// The kernels in a report: measurements on a GPU (reports/kernels/*.json), beside the hardware's
// limit and the fastest peer.
#pragma once

#include <string>

#include "cache_sim/report/view.hpp"

namespace lockstep::cache_sim {

/// The evidence of every kernel in a folder such as reports/kernels/, once for each card that it
/// was measured on, with the texts of the page. A kernel that is listed in pending.json beside that
/// folder has a `pending` reason. An empty array if there is no such folder. Errors name the file
/// and the field.
Result<Json> kernels_of(const std::string& folder);

/// Counts over all kernels: cases with a peer, and how many of them are faster and slower than the
/// fastest peer.
Json kernel_totals(const Json& kernels);

/// The view of /kernels/… for the template kernels.html.
View kernel_view(const JsonField& kernel);

}  // namespace lockstep::cache_sim
