// What was started on a stream and ends later than its call: receives, whose sender may not have come to its send yet.
#pragma once
#include <functional>

// Start it on a stream. ``end(wait)`` ends it, or returns false where that would mean waiting and ``wait`` is false.
void pend(const void* stream, std::function<bool(bool wait)> end);

// An event was recorded on a stream: it ends with what was started there until now.
void pending_record(const void* event, const void* stream);

// End all before an event; false where ``wait`` is false and something before it has not come.
bool pending_event(const void* event, bool wait);

// End all of a stream; false likewise.
bool pending_stream(const void* stream, bool wait);

// End all of all streams.
void pending_device();
