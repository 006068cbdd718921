#include "cache_sim/report/junit.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cache_sim/report/svg.hpp"

namespace lockstep::cache_sim {
namespace {

std::string suite_xml(const std::string& name, const Json& runs) {
  std::string cases;
  int failures = 0;
  for (const Json& run : runs) {
    cases += fmt::format("  <testcase classname=\"{}\" name=\"{}\" time=\"{:.6f}\"", escaped(name),
                         escaped(run["command"].get<std::string>()),
                         run["run"]["timing"]["wall_s"].get<double>());
    if (run["as_expected"]) {
      cases += "/>\n";
      continue;
    }
    ++failures;
    std::string text = run["complaint"];
    for (const Json& finding : run["run"]["findings"])
      text += "\n" + finding["text"].get<std::string>();
    const std::string kind =
        run["found"].is_null() ? "nothing-found" : run["found"].get<std::string>();
    cases +=
        fmt::format(">\n   <failure type=\"{}\" message=\"{}\">{}</failure>\n  </testcase>\n",
                    escaped(kind), escaped(run["complaint"].get<std::string>()), escaped(text));
  }
  return fmt::format(
      " <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"0\">\n{} </testsuite>\n",
      escaped(name), runs.size(), failures, cases);
}

}  // namespace

std::string report_junit(const Json& document) {
  std::string suites;
  for (const Json& trace : document["traces"]) suites += suite_xml(trace["file"], trace["runs"]);
  for (const Json& workload : document["workloads"])
    suites += suite_xml(workload["workload"], workload["runs"]);
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"lockstep report\" "
      "tests=\"{}\" "
      "failures=\"{}\" errors=\"0\">\n{}</testsuites>\n",
      document["summary"]["runs"].get<std::int64_t>(),
      document["summary"]["not_as_expected"].get<std::int64_t>(), suites);
}

}  // namespace lockstep::cache_sim
