// Workloads: the requests of clients, one by one. The format of a file is recognised by its
// content, a generated workload by its name. Both are streams, so a million requests are never in
// memory at once. A new format or generator is a new file that registers itself at its end.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "cache_sim/base/json_documents.hpp"
#include "reference/base/registry.hpp"
#include "reference/protocol/request.hpp"

namespace lockstep::cache_sim {

/// Requests in order of arrival.
class RequestStream {
 public:
  virtual ~RequestStream() = default;

  /// Gives the next request with its arrival and an id or a number; false at the end, where `spec`
  /// is unchanged. The error names the file, the line and the field.
  virtual Result<bool> next(RequestSpec& spec) = 0;

  /// Prefixes are shared in units of this many tokens: the block size of the trace, or 1 if the
  /// tokens themselves are known.
  virtual std::uint32_t block_size() const { return 1; }
  /// Whether a later prompt can contain the output of an earlier request. The public block traces
  /// name blocks of prompts alone.
  virtual bool knows_outputs() const { return true; }
};

using OpenedStream = Result<std::unique_ptr<RequestStream>>;

/// A workload that is generated from parameters: `NAME[:key=value,…]`.
struct GeneratedWorkload {
  std::string_view name;
  std::string_view summary;
  std::string_view parameters;  ///< the names of the parameters, for `lockstep list workloads`
  OpenedStream (*open)(std::string_view parameters);
};

/// A format of workload files: JSON lines or JSON documents.
struct WorkloadFormat {
  std::string_view name;
  std::string_view summary;
  bool (*recognises)(const nlohmann::json& first);  ///< from the fields of the first document
  OpenedStream (*open)(std::unique_ptr<JsonDocuments> documents);
};

/// The generated workload of a command-line word `NAME[:…]`; null if the word names a file.
const GeneratedWorkload* find_generated(std::string_view word);

/// Whether a file is a workload and not a trace: it begins with a JSON object or with a zstd frame.
/// False if it cannot be read.
bool is_workload_file(const std::string& path);

/// Opens a generated workload or a file; at most `limit` requests, 0: all.
OpenedStream open_workload(const std::string& word, std::int64_t limit = 0);

// --- Documents of tokens -------------------------------------------------------------------------

/// Documents of workloads. No trace can name them: names of up to six letters are below 2^29. The
/// documents of outputs are numbered as in trace files, from 2^30 on.
inline constexpr Document kBlockDocuments = Document{1} << 29;  ///< + number of a block
inline constexpr std::uint32_t kMostBlocks = 1u << 28;          ///< different blocks of one file
inline constexpr Document kSessionDocuments = kBlockDocuments + kMostBlocks;
inline constexpr std::uint32_t kMostSessionDocuments = 1u << 28;
inline constexpr Document kOutputDocuments = Document{1} << 30;  ///< + number of a request
inline constexpr std::int64_t kMostRequests = (std::int64_t{1} << 30) - 2;

}  // namespace lockstep::cache_sim
