// A collector that writes down what it is told. libittnotify loads the library that the environment's
// INTEL_LIBITTNOTIFY64 names, and finds in it the functions of ITT by their names, as far as it has them.
#include "collector.hpp"

#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#define INTEL_NO_MACRO_BODY
#define INTEL_ITTNOTIFY_API_PRIVATE
#include <ittnotify.h>

namespace {

using rapt::testing::IttEvent, rapt::testing::IttId;

std::mutex mutex;
std::vector<IttEvent> events;
std::deque<std::string> texts;  // of domains and names: these stay where they are
std::deque<__itt_domain> domains;
std::deque<__itt_string_handle> names;

const char* keep(const char* text) {
  return texts.emplace_back(text).c_str();
}
IttId id_of(const __itt_id& id) {
  return {id.d1, id.d2, id.d3};
}
// oneTBB has a domain of its own.
void add(const __itt_domain* domain, IttEvent event) {
  const std::lock_guard lock(mutex);
  if (std::strcmp(domain->nameA, "rapt") == 0) events.push_back(std::move(event));
}

}  // namespace

extern "C" {

const char* __itt_api_version() {
  return "3.0";
}
__itt_domain* __itt_domain_create(const char* name) {
  const std::lock_guard lock(mutex);
  __itt_domain& domain = domains.emplace_back();
  domain.flags = 1, domain.nameA = keep(name);
  return &domain;
}
__itt_string_handle* __itt_string_handle_create(const char* name) {
  const std::lock_guard lock(mutex);
  __itt_string_handle& handle = names.emplace_back();
  handle.strA = keep(name);
  return &handle;
}
void __itt_id_create(const __itt_domain* domain, __itt_id id) {
  add(domain, {"id_create", std::this_thread::get_id(), "", id_of(id)});
}
void __itt_id_destroy(const __itt_domain* domain, __itt_id id) {
  add(domain, {"id_destroy", std::this_thread::get_id(), "", id_of(id)});
}
void __itt_region_begin(const __itt_domain* domain, __itt_id id, __itt_id parent, __itt_string_handle* name) {
  add(domain, {"region_begin", std::this_thread::get_id(), name->strA, id_of(id), id_of(parent)});
}
void __itt_region_end(const __itt_domain* domain, __itt_id id) {
  add(domain, {"region_end", std::this_thread::get_id(), "", id_of(id)});
}
void __itt_task_begin(const __itt_domain* domain, __itt_id id, __itt_id parent, __itt_string_handle* name) {
  add(domain, {"task_begin", std::this_thread::get_id(), name->strA, id_of(id), id_of(parent)});
}
void __itt_task_end(const __itt_domain* domain) {
  add(domain, {"task_end", std::this_thread::get_id()});
}

std::vector<IttEvent> rapt_itt_events() {
  const std::lock_guard lock(mutex);
  return std::exchange(events, {});
}

}  // extern "C"
