// Fields of a checkpoint's config.json, with one sentence for the first that is wrong.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "reference/base/result.hpp"

namespace lockstep::reference {

/// A file of a checkpoint. The error names it.
inline Result<std::ifstream> open_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path)) return fail(path + ": cannot be read");
  return file;
}

/// Reads config.json. Errors name the file.
inline Result<nlohmann::json> read_config_object(const std::string& path) {
  Result<std::ifstream> file = open_file(path);
  if (!file) return tl::unexpected(file.error());
  nlohmann::json object = nlohmann::json::parse(*file, nullptr, false);
  if (!object.is_object()) return fail(path + ": is no JSON object");
  return object;
}

class ConfigFields {
 public:
  /// `object` outlives it; `path` is named by errors.
  ConfigFields(const nlohmann::json& object, std::string path)
      : object_(object), path_(std::move(path)) {}

  std::int64_t size(const char* name) {
    const nlohmann::json found = object_.value(name, nlohmann::json());
    if (found.is_number_integer() && found >= 1 && found <= (1 << 24)) return found;
    note(std::string(name) + " is " + found.dump() + ", no size from 1 to 16777216");
    return 1;
  }
  double positive(const nlohmann::json& object, const char* name) {
    const nlohmann::json found =
        object.is_object() ? object.value(name, nlohmann::json()) : nlohmann::json();
    if (found.is_number() && found > 0.0) return found;
    note(std::string(name) + " is " + found.dump() + ", no number above 0");
    return 1;
  }
  double positive(const char* name) { return positive(object_, name); }
  /// A field that is false where it is absent.
  bool flag(const char* name) {
    const nlohmann::json found = object_.value(name, nlohmann::json(false));
    if (!found.is_boolean()) note(std::string(name) + " is " + found.dump() + ", no true or false");
    return found == true;
  }
  /// Expects a field to be absent or to have this value.
  void is(const nlohmann::json& object, const char* name, const nlohmann::json& value) {
    const nlohmann::json found = object.is_object() ? object.value(name, value) : nlohmann::json();
    if (found != value)
      note(std::string(name) + " is " + found.dump() + "; only " + value.dump() + " is known here");
  }
  void is(const char* name, const nlohmann::json& value) { is(object_, name, value); }
  /// RoPE's fields: transformers 5 has them in an object of their own, older files beside the
  /// others and in `rope_scaling`.
  nlohmann::json rope() const {
    if (object_.contains("rope_parameters")) return object_["rope_parameters"];
    nlohmann::json fields = object_.value("rope_scaling", nlohmann::json());
    if (!fields.is_object()) fields = nlohmann::json::object();
    if (fields.contains("type")) fields["rope_type"] = fields["type"];
    for (const char* const name : {"rope_theta", "partial_rotary_factor"})
      if (object_.contains(name)) fields[name] = object_[name];
    return fields;
  }
  const nlohmann::json& object() const { return object_; }
  void note(const std::string& text) {
    if (error_.empty()) error_ = path_ + ": " + text;
  }
  const std::string& error() const { return error_; }

 private:
  const nlohmann::json& object_;
  std::string path_, error_;
};

}  // namespace lockstep::reference
