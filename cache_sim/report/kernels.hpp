// The kernels' part of a report: what was measured of them on a GPU (reports/kernels/*.json),
// beside the hardware's limit and the fastest peer.
#pragma once

#include <string>

#include "cache_sim/report/view.hpp"

namespace lockstep::cache_sim {

/// The evidence of every kernel in a folder like reports/kernels/, by name, with the figures as the
/// page shows them; a kernel that pending.json beside that folder lists has a `pending` reason. An
/// empty array where there is no such folder. Errors name the file and the field.
Result<Json> kernels_of(const std::string& folder);

/// Shapes with a peer, and in how many ours are faster and slower than the fastest, over all.
Json kernel_totals(const Json& kernels);

/// /kernels/… for the template kernels.html.
View kernel_view(const JsonField& kernel);

}  // namespace lockstep::cache_sim
