#include "cache_sim/base/json_documents.hpp"

#include <fmt/format.h>
#include <zstd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "cache_sim/base/input.hpp"

namespace lockstep::cache_sim {
namespace {

using nlohmann::json;

constexpr std::size_t kChunk = std::size_t{1} << 16;
// Limits of one document, so that a small compressed file cannot fill the memory: a value takes at
// least 16 bytes, and a request of a log has at most 2^24 tokens.
constexpr std::size_t kMostDocument = std::size_t{256} << 20;
constexpr std::int64_t kMostValues = 20'000'000;
/// Readers descend into a document by recursion; a session with a sub-agent is nested two levels
/// deep.
constexpr int kMostDepth = 100;
constexpr std::string_view kBlanks = " \t\r\n";

class PlainBytes final : public ByteSource {
 public:
  PlainBytes(std::string path, std::ifstream file)
      : path_(std::move(path)), file_(std::move(file)) {}

  Result<bool> append_to(std::string& buffer) override {
    const std::size_t size = buffer.size();
    buffer.resize(size + kChunk);
    file_.read(buffer.data() + size, kChunk);
    buffer.resize(size + static_cast<std::size_t>(file_.gcount()));
    if (file_.bad()) return fail(path_ + ": cannot be read to its end");
    return buffer.size() > size;
  }

 private:
  std::string path_;
  std::ifstream file_;
};

class ZstdBytes final : public ByteSource {
 public:
  ZstdBytes(std::string path, std::unique_ptr<ByteSource> packed)
      : path_(std::move(path)), packed_(std::move(packed)), stream_(ZSTD_createDStream()) {}

  Result<bool> append_to(std::string& buffer) override {
    const std::size_t size = buffer.size();
    buffer.resize(size + kChunk);
    ZSTD_outBuffer out{buffer.data(), buffer.size(), size};
    while (out.pos == size) {
      if (in_ == input_.size()) {
        input_.clear();
        in_ = 0;
        Result<bool> more = packed_->append_to(input_);
        if (!more) return more;
        if (!*more) {
          buffer.resize(size);
          if (input_hint_ != 0)
            return fail(path_ + ": the zstd data end early: the file is truncated");
          return false;
        }
      }
      ZSTD_inBuffer in{input_.data(), input_.size(), in_};
      input_hint_ = ZSTD_decompressStream(stream_.get(), &out, &in);
      in_ = in.pos;
      if (ZSTD_isError(input_hint_) != 0)
        return fail(
            fmt::format("{}: is not whole zstd data: {}", path_, ZSTD_getErrorName(input_hint_)));
    }
    buffer.resize(out.pos);
    return true;
  }

 private:
  struct Free {
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };
  std::string path_;
  std::unique_ptr<ByteSource> packed_;
  std::unique_ptr<ZSTD_DStream, Free> stream_;
  std::string input_;
  std::size_t in_ = 0;
  std::size_t input_hint_ = 0;  // zstd's hint for the next input; 0 at the end of a frame
};

std::string kind_of(const json& value) {
  if (value.is_number_float())
    return std::abs(value.get<double>()) < 0x1p63 ? "a number with a fraction"
                                                  : "a number of more than 64 bits";
  if (value.is_null()) return "null";
  const std::string name = value.type_name();
  return (name == "array" || name == "object" ? "an " : "a ") + name;
}

std::int64_t fields_in(const json& value) {
  std::int64_t fields = value.is_object() ? static_cast<std::int64_t>(value.size()) : 0;
  if (value.is_structured())
    for (const json& child : value) fields += fields_in(child);
  return fields;
}

/// The first field that stands twice in one object of a document that has such a field.
std::string repeated_field(std::string_view text) {
  std::vector<std::set<std::string>> open;
  std::string found;
  [[maybe_unused]] const json whole =
      json::parse(text, [&](int, json::parse_event_t event, json& value) {
        if (event == json::parse_event_t::object_start) open.emplace_back();
        if (event == json::parse_event_t::object_end) open.pop_back();
        if (event == json::parse_event_t::key && found.empty() &&
            !open.back().insert(value.get<std::string>()).second)
          found = value.get<std::string>();
        return true;
      });
  return found;
}

}  // namespace

Result<std::unique_ptr<ByteSource>> open_bytes(const std::string& path) {
  Result<std::ifstream> file = open_input(path);
  if (!file) return tl::unexpected(file.error());
  char head[4] = {};
  file->read(head, sizeof head);
  const std::string_view begin(head, static_cast<std::size_t>(file->gcount()));
  const bool packed = begin == kZstdMagic;
  file->clear();
  file->seekg(0);
  std::unique_ptr<ByteSource> bytes = std::make_unique<PlainBytes>(path, std::move(*file));
  if (packed) bytes = std::make_unique<ZstdBytes>(path, std::move(bytes));
  return bytes;
}

JsonDocuments::JsonDocuments(std::string path, std::unique_ptr<ByteSource> bytes)
    : path_(std::move(path)),
      bytes_(std::move(bytes)),
      document_(std::make_unique<nlohmann::json>()) {}

JsonDocuments::~JsonDocuments() = default;

Result<std::unique_ptr<JsonDocuments>> JsonDocuments::open(const std::string& path) {
  return open_bytes(path).map([&](std::unique_ptr<ByteSource> bytes) {
    return std::unique_ptr<JsonDocuments>(new JsonDocuments(path, std::move(bytes)));
  });
}

std::string JsonDocuments::place() const {
  return fmt::format("{}:{}", path_, document_line_);
}

Result<const json*> JsonDocuments::peek() {
  Result<const json*> document = next();
  peeked_ = document && *document != nullptr;
  return document;
}

Result<const json*> JsonDocuments::next() {
  if (peeked_) {
    peeked_ = false;
    return document_.get();
  }
  return read();
}

/// Reads more bytes into the buffer; false at the end of the file.
Result<bool> JsonDocuments::fill() {
  if (ended_) return false;
  buffer_.erase(0, at_);
  at_ = 0;
  return bytes_->append_to(buffer_).map([&](bool more) {
    ended_ = !more;
    return more;
  });
}

/// Moves `at_` to the next byte that is no blank; false at the end of the file.
Result<bool> JsonDocuments::skip_blanks() {
  for (;;) {
    for (; at_ < buffer_.size(); ++at_) {
      if (kBlanks.find(buffer_[at_]) == std::string_view::npos) return true;
      if (buffer_[at_] == '\n') ++line_;
    }
    Result<bool> more = fill();
    if (!more || !*more) return more;
  }
}

/// The position after the brace that closes the object at `at_`.
Result<std::size_t> JsonDocuments::find_end() {
  int depth = 0;  // open objects
  int lists = 0;  // open arrays
  fields_ = 0;
  std::int64_t values = 0;
  bool in_text = false;
  bool escaped = false;
  for (std::size_t i = 0;; ++i) {
    while (at_ + i == buffer_.size()) {
      if (i > kMostDocument) return fail(place() + ": the document is longer than 256 MiB");
      const Result<bool> more = fill();
      if (!more) return tl::unexpected(more.error());
      if (!*more)
        return fail(place() + ": the file ends inside this document: it may be truncated");
    }
    const char c = buffer_[at_ + i];
    if (c == '\n') ++line_;
    if (in_text) {
      if (c == '"' && !escaped) in_text = false;
      escaped = c == '\\' && !escaped;
      continue;
    }
    if (c == '"') in_text = true;
    if (c == '{') ++depth;
    if (c == '}' && --depth == 0) return at_ + i + 1;
    if (c == '[') ++lists;
    if (c == ']') --lists;
    if (c == ',' || c == '{' || c == '[') ++values;
    if (c == ':') ++fields_;
    if (depth + lists > kMostDepth)
      return fail(
          fmt::format("{}: the document is nested deeper than {} levels", place(), kMostDepth));
    if (values > kMostValues)
      return fail(fmt::format("{}: the document holds more than {} values", place(), kMostValues));
  }
}

Result<const json*> JsonDocuments::read() {
  const Result<bool> more = skip_blanks();
  if (!more) return tl::unexpected(more.error());
  if (!*more) return nullptr;
  document_line_ = line_;
  if (buffer_[at_] != '{')
    return fail(fmt::format("{}: here a JSON object begins, and not `{}`{}", place(), buffer_[at_],
                            buffer_[at_] == '[' ? "; `jq -c '.[]'` makes lines of an array" : ""));
  const Result<std::size_t> end = find_end();
  if (!end) return tl::unexpected(end.error());
  const std::string_view text = std::string_view(buffer_).substr(at_, *end - at_);
  try {
    *document_ = json::parse(text);
    if (fields_in(*document_) != fields_)  // of two fields of a name the parser keeps the last
      return fail(fmt::format("{}: field {} stands twice", place(), repeated_field(text)));
  } catch (const json::parse_error& error) {
    return fail(fmt::format("{}: is not JSON at its byte {}", place(), error.byte));
  } catch (const json::exception&) {
    return fail(place() + ": holds a number that no machine holds");
  }
  at_ = *end;
  return document_.get();
}

// --- Fields --------------------------------------------------------------------------------------

tl::unexpected<Error> Record::error(std::string_view field, const std::string& text) const {
  return fail(fmt::format("{}: field {}{}: {}", place_, path_, field, text));
}

const json* Record::find(std::string_view field) const {
  const auto found = object_->find(field);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

Result<const json*> Record::need(std::string_view field) const {
  const auto found = object_->find(field);
  if (found == object_->end()) return error(field, "is missing");
  return &*found;  // a null is found too, and then refused because it has no type
}

namespace {

/// The reason why the value is no integer within [low, high]; empty where it is one.
std::string integer_error(const json& value, std::int64_t low, std::int64_t high) {
  if (!value.is_number_integer()) return kind_of(value) + ", not a whole number";
  const bool too_large =
      value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(high);
  if (too_large) return fmt::format("{} is above {}", value.dump(), high);
  if (value.get<std::int64_t>() < low) return fmt::format("{} is below {}", value.dump(), low);
  return "";
}

}  // namespace

Result<std::int64_t> Record::integer(std::string_view field, std::int64_t low,
                                     std::int64_t high) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (const std::string wrong = integer_error(**value, low, high); !wrong.empty())
    return error(field, wrong);
  return (*value)->get<std::int64_t>();
}

Result<Nanoseconds> Record::time(std::string_view field, Nanoseconds unit) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (!(*value)->is_number()) return error(field, kind_of(**value) + ", not a number");
  const double nanoseconds = (*value)->get<double>() * static_cast<double>(unit);
  if (!(nanoseconds >= 0)) return error(field, fmt::format("{} is below 0", (*value)->dump()));
  if (nanoseconds > static_cast<double>(kLatestTime))
    return error(field,
                 fmt::format("{} is later than 2^62 ns, which is 146 years", (*value)->dump()));
  if ((*value)->is_number_integer()) return (*value)->get<std::int64_t>() * unit;
  return static_cast<Nanoseconds>(std::llround(nanoseconds));
}

Result<Nanoseconds> Record::time_after(Nanoseconds earlier, std::string_view field,
                                       Nanoseconds unit) const {
  Result<Nanoseconds> later = time(field, unit);
  if (!later) return later;
  if (*later > kLatestTime - earlier)
    return error(field, fmt::format("counted from {}, it is later than 2^62 ns, which is 146 years",
                                    time_text(earlier)));
  return earlier + *later;
}

Result<std::string> Record::text(std::string_view field) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (!(*value)->is_string()) return error(field, kind_of(**value) + ", not a string");
  return (*value)->get<std::string>();
}

Result<bool> Record::flag(std::string_view field) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (!(*value)->is_boolean()) return error(field, kind_of(**value) + ", not true or false");
  return (*value)->get<bool>();
}

Result<Record> Record::object(std::string_view field) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (!(*value)->is_object()) return error(field, kind_of(**value) + ", not an object");
  return Record(**value, place_, fmt::format("{}{}.", path_, field));
}

Result<std::vector<std::int64_t>> Record::integers(std::string_view field, std::int64_t low,
                                                   std::int64_t high) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (!(*value)->is_array()) return error(field, kind_of(**value) + ", not an array");
  std::vector<std::int64_t> all;
  all.reserve((*value)->size());
  for (const json& one : **value) {
    if (const std::string wrong = integer_error(one, low, high); !wrong.empty())
      return error(fmt::format("{}[{}]", field, all.size()), wrong);
    all.push_back(one.get<std::int64_t>());
  }
  return all;
}

Result<std::vector<std::int64_t>> Record::token_ids(std::string_view field) const {
  return integers(field, 0, std::numeric_limits<std::uint32_t>::max());
}

Result<std::vector<double>> Record::numbers(std::string_view field) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (!(*value)->is_array()) return error(field, kind_of(**value) + ", not an array");
  std::vector<double> all;
  all.reserve((*value)->size());
  for (const json& one : **value) {
    const std::string place = fmt::format("{}[{}]", field, all.size());
    if (!one.is_number()) return error(place, kind_of(one) + ", not a number");
    if (!(one.get<double>() >= 0)) return error(place, one.dump() + " is below 0");
    all.push_back(one.get<double>());
  }
  return all;
}

Result<std::vector<Record>> Record::objects(std::string_view field) const {
  const Result<const json*> value = need(field);
  if (!value) return tl::unexpected(value.error());
  if (!(*value)->is_array()) return error(field, kind_of(**value) + ", not an array");
  std::vector<Record> all;
  for (const json& one : **value) {
    const std::string path = fmt::format("{}{}[{}]", path_, field, all.size());
    if (!one.is_object())
      return fail(fmt::format("{}: field {}: {}, not an object", place_, path, kind_of(one)));
    all.emplace_back(one, place_, path + ".");
  }
  return all;
}

}  // namespace lockstep::cache_sim
