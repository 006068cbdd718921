#include "cache_sim/report/kernels.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

namespace lockstep::cache_sim {
namespace {

Result<Json> read_json(const std::filesystem::path& file) {
  std::ifstream in(file);
  Json json = Json::parse(in, nullptr, false);
  if (!in || json.is_discarded()) return fail(file.string() + ": is no JSON file");
  return json;
}

std::string microseconds(double us) {
  return us < 100 ? fmt::format("{:.2f} µs", us) : fmt::format("{:.0f} µs", us);
}

/// Adds the texts of one case to its row. `peer_share` is the peer's share of the hardware's limit.
void add_texts(Json& row) {
  const double time = row.at("time_us").get<double>(), share = row.at("limit_share").get<double>();
  row["time_text"] = microseconds(time);
  row["share_text"] = fmt::format("{:.0f} %", 100 * share);
  row["rate_text"] = fmt::format("{:.0f} GB/s", row.at("gbps").get<double>());
  if (row.value("peer_time_us", Json()).is_number()) {
    const double peer = row.at("peer_time_us").get<double>();
    row["peer_text"] =
        fmt::format("{} ({}{})", microseconds(peer), row.at("peer").get<std::string>(),
                    row.at("peer_run") == "recorded" ? ", recorded" : "");
    row["ratio_text"] = fmt::format("{:.2f}", time / peer);
    row["peer_share"] = share * time / peer;
  }
}

constexpr double kNoise = 0.02;  // times that differ by less than this count as equal

/// A kernel's speed beside the fastest peer of each case; null if no case has a peer.
Json summary_of(const Json& speed) {
  std::vector<double> ratios;
  std::set<std::string> peers;
  double worst = 0;
  std::string worst_case;
  for (const Json& row : speed) {
    if (!row.contains("ratio_text")) continue;
    const double ratio = row.at("time_us").get<double>() / row.at("peer_time_us").get<double>();
    ratios.push_back(ratio);
    peers.insert(row.at("peer").get<std::string>());
    if (ratio <= worst) continue;
    worst = ratio;
    worst_case = row.at("case");
  }
  if (ratios.empty()) return nullptr;
  std::ranges::sort(ratios);
  const std::size_t half = ratios.size() / 2;
  const double median =
      ratios.size() % 2 == 1 ? ratios[half] : (ratios[half - 1] + ratios[half]) / 2;
  const auto count = [&](auto which) { return std::ranges::count_if(ratios, which); };
  return {{"shapes", ratios.size()},
          {"faster", count([](double ratio) { return ratio < 1 - kNoise; })},
          {"slower", count([](double ratio) { return ratio > 1 + kNoise; })},
          {"median", median},
          {"median_text", fmt::format("{:.2f}", median)},
          {"worst_text", fmt::format("{:.2f}", worst)},
          {"worst_case", worst_case},
          {"peers_text", fmt::format("{}", fmt::join(peers, "; "))}};
}

/// Sorts kernels: those with peers first, by their lead; then the others by name.
void sort_by_median(Json& kernels) {
  const auto key = [](const Json& kernel) {
    const Json& summary = kernel.at("summary");
    const int group = !summary.is_null() ? 0 : kernel.at("speed").empty() ? 2 : 1;
    return std::pair(group, summary.is_null() ? 0.0 : summary.at("median").get<double>());
  };
  std::stable_sort(kernels.begin(), kernels.end(),
                   [&](const Json& a, const Json& b) { return key(a) < key(b); });
}

/// The evidence of a kernel on one card: its file without the other cards' entries, and the texts.
Json kernel_on(const Json& file, const Json& chip) {
  Json kernel = file;
  kernel.erase("chips");
  kernel.update(chip);
  for (Json& row : kernel.at("speed")) add_texts(row);
  for (Json& row : kernel.at("accuracy"))
    row["text"] = fmt::format("{:.2e} of at most {:.2e}", row.at("error").get<double>(),
                              row.at("yardstick").get<double>());
  kernel["summary"] = summary_of(kernel.at("speed"));
  const std::string gpu = kernel.at("gpu").get<std::string>();
  constexpr std::string_view kMaker = "NVIDIA ";
  kernel["card"] = gpu.starts_with(kMaker) ? gpu.substr(kMaker.size()) : gpu;
  kernel["about"] =
      fmt::format("{}, driver {}, CUDA {}, {}; copy rate {:.0f} GB/s in the same run", gpu,
                  kernel.at("driver").get<std::string>(), kernel.at("cuda").get<std::string>(),
                  kernel.at("date").get<std::string>(), kernel.at("copy_gbps").get<double>());
  return kernel;
}

/// Adds to each case of a kernel's cards what the other cards took for it.
void add_other_cards(std::vector<Json>& cards) {
  for (Json& kernel : cards)
    for (Json& row : kernel.at("speed"))
      for (const Json& other : cards)
        for (const Json& same : other.at("speed"))
          if (&other != &kernel && same.at("case") == row.at("case"))
            row["other_cards"].push_back({{"card", other.at("card")},
                                          {"time_text", same.at("time_text")},
                                          {"ratio_text", same.value("ratio_text", Json())}});
}

/// The length of a bar in per cent of its box; the box can show a little more than the limit.
std::string bar_length(const JsonField& share) {
  return fmt::format("{:.1f}", 100 * std::min(share.number(), 1.1));
}

/// The figures of a case, its bar, and a mark for the fastest peer.
View speed_view(const JsonField& row) {
  View view = view_of(row);
  view.set("bar", bar_length(row.at("limit_share")));
  view.set("mark", row.has("peer_share") ? View(bar_length(row.at("peer_share"))) : View(false));
  view.set("other_cards", row.has("other_cards") ? view_of(row.at("other_cards")) : View(false));
  return view;
}

}  // namespace

Result<Json> kernels_of(const std::string& folder) {
  Json kernels = Json::array();
  if (!std::filesystem::is_directory(folder)) return kernels;
  const std::filesystem::path reasons =
      std::filesystem::path(folder).parent_path() / "pending.json";
  Json pending = Json::object();
  if (std::filesystem::exists(reasons)) {
    Result<Json> read = read_json(reasons);
    if (!read) return read;
    pending = std::move(*read);
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  std::ranges::sort(files);
  for (const std::filesystem::path& file : files) {
    Result<Json> read = read_json(file);
    if (!read) return read;
    std::vector<Json> cards;
    try {
      const std::string name = read->at("operation").get<std::string>();
      for (const Json& chip : read->at("chips")) {
        cards.push_back(kernel_on(*read, chip));
        cards.back()["anchor"] =
            cards.size() == 1 ? name : fmt::format("{}-{}", name, cards.size());
        if (pending.contains(name)) cards.back()["pending"] = pending.at(name);
      }
      add_other_cards(cards);
    } catch (const Json::exception& error) {
      return fail(file.string() + ": " + error.what());
    }
    for (Json& kernel : cards) kernels.push_back(std::move(kernel));
  }
  sort_by_median(kernels);
  return kernels;
}

Json kernel_totals(const Json& kernels) {
  Json totals = {{"noise", kNoise}};
  for (const char* const key : {"shapes", "faster", "slower"}) {
    std::int64_t sum = 0;
    for (const Json& kernel : kernels)
      if (!kernel.at("summary").is_null()) sum += kernel.at("summary").at(key).get<std::int64_t>();
    totals[key] = sum;
  }
  return totals;
}

View kernel_view(const JsonField& kernel) {
  View view = object_view();
  for (const char* const key : {"operation", "card", "about", "accuracy", "summary"})
    view.set(key, view_of(kernel.at(key)));
  view.set("speed", views_of(kernel.at("speed"),
                             [](const JsonField& row, std::size_t) { return speed_view(row); }));
  view.set("pending", kernel.has("pending") ? view_of(kernel.at("pending")) : View(false));
  view.set("anchor", kernel.at("anchor").text());
  view.set("has_speed", kernel.at("speed").size() > 0);
  return view;
}

}  // namespace lockstep::cache_sim
