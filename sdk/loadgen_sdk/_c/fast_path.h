/* The fast path of reading a response: feeds the most common reads to an exchange without calling
 * Python. Part of _compiled.c.
 *
 * A read is on the fast path if its head, if it has one, was parsed before, if its body is whole
 * chunks of whole events of at most one choice, and if no template has to be learned from it. It is
 * parsed completely before anything of it is used, so that any other read is left to Python as it
 * came. The reference implementation is transport/exchange.py with wire_formats/response_reader.py,
 * and the tests compare both. An exchange is a request with its response. */

/* The result of feeding a read to an exchange. */
enum FeedResult {
    FEED_FAILED = -1, /* with an exception */
    RESPONSE_GOES_ON = 0,
    RESPONSE_OVER = 1,
    NOT_FAST_PATH = 2, /* nothing was fed, and the read has to be left to Python */
};

enum { MAX_EVENTS = 16 }; /* of a read on the fast path */

/* A read that was parsed on the fast path. */
typedef struct {
    EventContent events[MAX_EVENTS];
    int event_count;
    int output_count; /* events with output */
    int chunk_count;
    int has_end;    /* the response ends with this read */
    PyObject *head; /* the tuple `ResponseHead` (borrowed), or NULL if the head came before */
} FastPathRead;

/* Set a parsed read to one without events. The array of events is large, so it is not cleared. */
static void init_fast_path_read(FastPathRead *fast_read)
{
    fast_read->event_count = 0;
    fast_read->output_count = 0;
    fast_read->chunk_count = 0;
    fast_read->has_end = 0;
    fast_read->head = NULL;
}

/* Release the token usages of the events of a parsed read. */
static void release_usages(FastPathRead *fast_read)
{
    for (int i = 0; i < fast_read->event_count; i++)
        Py_CLEAR(fast_read->events[i].usage);
    fast_read->event_count = 0;
}

/* -- the head of a response -------------------------------------------------------------------- */

/* The items of the tuple `ResponseHead` in transport/http1.py. */
enum HeadItem {
    HEAD_STATUS,
    HEAD_HEADERS,
    HEAD_MODE,
    HEAD_LENGTH,
    HEAD_REUSABLE,
    HEAD_USES_LEFT,
    HEAD_IDLE_LIMIT,
    HEAD_ITEM_COUNT
};

#define HEAD_END "\r\n\r\n"
enum { HEAD_END_BYTES = sizeof HEAD_END - 1 };

/* Return whether a read begins with the status line of a successful response (2xx). */
static int begins_with_success(const char *data, Py_ssize_t size)
{
    return skip_bytes(data, data + size, "HTTP/1.1 2", sizeof "HTTP/1.1 2" - 1) != NULL;
}

/* Return the end of a response head, before its blank line, or NULL if the head is incomplete. */
static const char *find_head_end(const char *data, const char *end)
{
    const char *cursor = data;
    while (end - cursor >= HEAD_END_BYTES) {
        cursor = memchr(cursor, '\r', (size_t)(end - cursor));
        if (cursor == NULL)
            return NULL;
        if (skip_bytes(cursor, end, HEAD_END, HEAD_END_BYTES) != NULL)
            return cursor;
        cursor++;
    }

    return NULL;
}

/* Return whether the Content-Type of a response is an event stream. `headers` is a dict with names
 * in lower case. */
static int has_event_stream_type(PyObject *headers)
{
    PyObject *content_type = PyDict_GetItemWithError(headers, name_content_type);
    if (content_type == NULL || !PyUnicode_Check(content_type))
        return 0;
    const int at_beginning = -1; /* 1 would compare the end. */
    return PyUnicode_Tailmatch(content_type, event_stream, 0, PY_SSIZE_T_MAX, at_beginning) == 1;
}

/* Return whether a parsed head (a tuple `ResponseHead`) is that of a chunked, uncompressed stream
 * of server-sent events. No exception is left set. */
static int is_stream_head(PyObject *head)
{
    if (!PyTuple_Check(head) || PyTuple_Size(head) != HEAD_ITEM_COUNT)
        return 0;

    PyObject *headers = PyTuple_GetItem(head, HEAD_HEADERS);
    PyObject *mode = PyTuple_GetItem(head, HEAD_MODE);
    if (!PyDict_Check(headers) || !PyUnicode_Check(mode))
        return 0;

    int is_chunked = PyUnicode_Compare(mode, mode_chunked) == 0;
    int is_compressed = PyDict_GetItemWithError(headers, name_content_encoding) != NULL;
    int is_stream = is_chunked && !is_compressed && has_event_stream_type(headers);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }

    return is_stream;
}

/* The last head of a stream that was found, and its bytes without the blank line.
 *
 * A server repeats its head byte by byte until the date in it changes, so that comparing it saves
 * the look-up in the dict of known heads. Both are NULL at first. */
static struct {
    PyObject *lines;
    PyObject *head;
} last_head;

/* Return the position after the head if a read begins with the last head, or NULL. */
static const char *skip_last_head(const char *data, const char *end)
{
    if (last_head.lines == NULL)
        return NULL;
    const char *head_end =
        skip_bytes(data, end, PyBytes_AsString(last_head.lines), PyBytes_Size(last_head.lines));
    return head_end == NULL ? NULL : skip_bytes(head_end, end, HEAD_END, HEAD_END_BYTES);
}

/* Look up a head, from `data` to `head_end`, among those that Python has parsed before.
 *
 * Return 1 if it is known and that of a stream of events. It has become `last_head` then. Otherwise
 * return 0. An error of the look-up counts as an unknown head, and its exception is cleared. */
static int look_up_stream_head(const char *data, const char *head_end)
{
    PyObject *lines = PyBytes_FromStringAndSize(data, head_end - data);
    if (lines == NULL) {
        PyErr_Clear();
        return 0;
    }

    PyObject *head = PyDict_GetItemWithError(known_heads, lines);
    if (head == NULL)
        PyErr_Clear();

    int is_known_stream = head != NULL && is_stream_head(head);
    if (is_known_stream) {
        set_field(&last_head.head, head);
        set_field(&last_head.lines, lines);
    }

    Py_DECREF(lines);
    return is_known_stream;
}

/* Parse the head of a response at the beginning of a read, if Python has parsed the same head
 * before and it is that of a successful stream of events.
 *
 * `*head` becomes the tuple `ResponseHead` (borrowed from `last_head`). Return the position after
 * the head, or NULL if Python has to parse it. */
static const char *parse_known_head(const char *data, const char *end, PyObject **head)
{
    if (!begins_with_success(data, end - data))
        return NULL;

    const char *body = skip_last_head(data, end);
    int is_another_head = body == NULL;
    if (is_another_head) {
        const char *head_end = find_head_end(data, end);
        if (head_end == NULL)
            return NULL; /* The head is incomplete. */
        int is_known_stream = look_up_stream_head(data, head_end); /* This sets `last_head`. */
        if (!is_known_stream)
            return NULL;
        body = head_end + HEAD_END_BYTES;
    }

    *head = last_head.head;
    return body;
}

/* -- parsing a read ---------------------------------------------------------------------------- */

/* Parse the events in the content of a chunk, and append them to `fast_read->events`.
 *
 * Return 1, or 0 if Python has to parse the read, because an event has several lines, is not of the
 * most common kind, or exceeds MAX_EVENTS. */
static int parse_chunk_events(const char *content, const char *end, FastPathRead *fast_read)
{
    int has_carriage_return = memchr(content, '\r', (size_t)(end - content)) != NULL;
    if (has_carriage_return)
        return 0;

    while (content < end) {
        int has_room = fast_read->event_count < MAX_EVENTS;
        if (!has_room)
            return 0;

        const char *event_end = skip_line_event(content, end);
        if (event_end == NULL)
            return 0;

        const char *payload = content + DATA_PREFIX_BYTES;
        const char *payload_end = event_end - EVENT_END_BYTES;
        EventContent *event = &fast_read->events[fast_read->event_count];
        if (!parse_common_event(payload, payload_end, event))
            return 0;

        fast_read->event_count++;
        fast_read->output_count += event->has_output;
        content = event_end;
    }

    return 1;
}

/* The chunk of size 0 that ends a chunked body. */
#define LAST_CHUNK "0\r\n\r\n"

/* Parse the chunks of a read (of an HTTP body) and add the server-sent events in them. Return 1, or
 * 0 if the read has to be left to Python, for example because its last chunk is incomplete. */
static int parse_chunks(const char *cursor, const char *end, FastPathRead *fast_read)
{
    while (cursor < end) {
        int is_last_chunk = skip_literal(cursor, end, LAST_CHUNK) == end;
        if (is_last_chunk) {
            fast_read->has_end = 1;
            return 1;
        }

        const char *content, *content_end;
        cursor = parse_chunk(cursor, end, &content, &content_end);
        if (cursor == NULL || !parse_chunk_events(content, content_end, fast_read))
            return 0;

        fast_read->chunk_count++;
    }

    return 1;
}

/* Return whether no bytes of an earlier read wait for the rest of their line or event. */
static int is_between_events(const ResponseParser *response, const SseDecoder *decoder)
{
    return PyObject_Size(response->_unparsed) == 0 && PyObject_Size(decoder->_unparsed) == 0 &&
           !decoder->_is_after_cr;
}

/* Return whether the next byte of a response is the first one of its head, or of a chunk of events.
 *
 * It is not if an earlier read ended within the head, a chunk or an event, if the body is not a
 * stream of events in chunks, or if the response is over. */
static int is_at_head_or_chunk(const Exchange *exchange)
{
    const ResponseParser *response = (ResponseParser *)exchange->response;
    if (!is_between_events(response, (SseDecoder *)exchange->decoder))
        return 0;

    int is_head_complete = response->status != 0;
    if (!is_head_complete)
        return response->_mode == mode_head; /* Both are the same interned string. */

    int is_chunked_stream = exchange->is_event_stream && response->is_chunked;
    return is_chunked_stream && exchange->is_at_chunk_start && !response->is_complete;
}

/* Return whether the next read of a response may be parsed in C, which depends on what came before
 * it.
 *
 * Python parses the read if a part of the response is incomplete (see `is_at_head_or_chunk`), if
 * the texts of the response are stored or passed on, and if the read seems to be older than the
 * first output. That is possible if the clock of the kernel was set meanwhile. */
static int may_use_fast_path(const Exchange *exchange, const Read *read)
{
    const ResponseReader *reader = (ResponseReader *)exchange->reader;
    if (read->size == 0)
        return 0;

    int needs_texts = reader->text_pieces != Py_None || reader->on_output != Py_None;
    if (needs_texts)
        return 0;

    int was_clock_set = read->timestamp < reader->first_token; /* This is NEVER (-1) at first. */
    if (was_clock_set)
        return 0;

    return is_at_head_or_chunk(exchange);
}

/* Return whether a reader has a template of plain events, or may still learn one.
 *
 * A template is the bytes around the text of an event, by which later events with the same bytes
 * are recognised. The first four templates of a response are learned in any case. After that, each
 * further one is learned only after four more events were recognised. */
static int uses_templates(const ResponseReader *reader)
{
    const int free_templates = 4;
    const int events_per_further_template = 4;
    int has_template = reader->template != Py_None;
    if (has_template)
        return 1;

    int64_t earned_templates = reader->plain_events / events_per_further_template;

    /* For a short response, the constructor has set the number of learned templates so high that
     * no template is learned. */
    return reader->learned_templates < free_templates + earned_templates;
}

/* Parse a read of a response into `*fast_read`, if it is of the most common kind. The exchange (the
 * request and its response) is not changed.
 *
 * Return 1, or 0 if Python has to process the read. After both results the caller must call
 * `release_usages`, because the parsed events have references to token usages. */
static int parse_fast_path_read(const Exchange *exchange, const Read *read, FastPathRead *fast_read)
{
    init_fast_path_read(fast_read);
    if (!may_use_fast_path(exchange, read))
        return 0;

    const ResponseParser *response = (ResponseParser *)exchange->response;
    const char *body = read->data;
    const char *end = read->data + read->size;
    int begins_with_head = response->status == 0;
    if (begins_with_head) {
        body = parse_known_head(read->data, end, &fast_read->head);
        if (body == NULL)
            return 0;
    }
    if (!parse_chunks(body, end, fast_read))
        return 0;

    int has_output = fast_read->output_count > 0;
    if (!has_output)
        return 1;

    /* The templates, which are the bytes around the text of an event, are used and learned by the
     * reader in Python. */
    return !uses_templates((ResponseReader *)exchange->reader);
}

/* -- the event timeline ------------------------------------------------------------------------ */

/* The lists of the event timeline that was used last.
 *
 * Events of many responses are added to one timeline, so that its lists are looked up only when the
 * timeline changes. A timeline keeps its lists for its lifetime. All are NULL at first. */
static struct {
    PyObject *timeline;
    PyObject *gaps;       /* between output events, in ns */
    PyObject *timestamps; /* of output events, in ns */
} last_timeline;

/* Make `last_timeline` the timeline that is given, and look up its lists, unless it is that one
 * already. A timeline collects the times of output events. Return 0, or -1 with an exception. */
static int load_timeline(PyObject *timeline)
{
    int is_loaded = timeline == last_timeline.timeline;
    if (is_loaded)
        return 0;

    PyObject *gaps = PyObject_GetAttr(timeline, name_gaps);
    if (gaps == NULL)
        return -1;

    PyObject *timestamps = PyObject_GetAttr(timeline, name_timestamps);
    if (timestamps == NULL) {
        Py_DECREF(gaps);
        return -1;
    }

    set_field(&last_timeline.timeline, timeline);
    set_field_stealing(&last_timeline.gaps, gaps);
    set_field_stealing(&last_timeline.timestamps, timestamps);

    return 0;
}

/* Append a gap between two output events to a timeline. Return 0, or -1 with an exception. */
static int append_gap(PyObject *timeline, int64_t gap_ns)
{
    if (load_timeline(timeline) < 0)
        return -1;
    return append_stealing(last_timeline.gaps, PyLong_FromLongLong(gap_ns));
}

/* Append the timestamp of an output event to a timeline. Return 0, or -1 with an exception. */
static int append_timestamp(PyObject *timeline, int64_t timestamp)
{
    if (load_timeline(timeline) < 0)
        return -1;
    return append_stealing(last_timeline.timestamps, PyLong_FromLongLong(timestamp));
}

/* Append a pair (uncertainty in ns, number of events with it) to a timeline. Return 0, or -1 with
 * an exception. */
static int append_uncertainty(PyObject *timeline, int64_t uncertainty_ns, int64_t event_count)
{
    PyObject *uncertainties = PyObject_GetAttr(timeline, name_uncertainties);
    if (uncertainties == NULL)
        return -1;
    PyObject *pair = Py_BuildValue("LL", (long long)uncertainty_ns, (long long)event_count);
    int status = append_stealing(uncertainties, pair);
    Py_DECREF(uncertainties);
    return status;
}

/* -- feeding events to the reader -------------------------------------------------------------- */

/* Return a float as an int if it is a count of tokens: a whole number from 0 to MAX_TOKEN_COUNT,
 * such as 8.0, which some servers write for 8. Return NULL without an exception for any other
 * float. */
static PyObject *token_count_of_float(PyObject *value)
{
    double number = PyFloat_AsDouble(value);
    int is_in_range = number >= 0 && number <= (double)MAX_TOKEN_COUNT;
    if (!is_in_range)
        return NULL;
    int is_whole = number == (double)(int64_t)number;
    return is_whole ? PyLong_FromDouble(number) : NULL;
}

/* The Python function token_count(value).
 *
 * Return the value as an int if it is a count of tokens, else None. A count is a whole number of at
 * most 31 bits, which is what the columns of the results can hold. It may be a float, but no
 * bool. */
static PyObject *token_count(PyObject *Py_UNUSED(module), PyObject *value)
{
    PyObject *count = NULL;
    if (PyFloat_Check(value))
        count = token_count_of_float(value);
    else if (read_token_count(value) >= 0) {
        Py_INCREF(value);
        count = value;
    }

    if (count == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;

    return count;
}

/* Return whether a finish reason of the response has come. */
static int has_finish_reason(const ResponseReader *reader)
{
    return PyObject_Size(reader->finish_reason) > 0;
}

/* Store the token usage of an event in the reader. Return 0, or -1 with an exception.
 *
 * A usage with output tokens, under the names of the chat API, replaces an earlier one. Any other
 * usage is left to the method in Python.
 *
 * Some servers send a usage with each event, which counts the tokens so far. With the first output
 * event, it is therefore the number of tokens in that event, unless the response ends with it. */
static int feed_usage(ResponseReader *reader, PyObject *usage)
{
    int64_t output_tokens = output_tokens_of_usage(usage);
    int is_usual_usage = output_tokens > 0;
    if (!is_usual_usage) {
        /* "O" passes the usage on as the only argument. */
        return discard_result(PyObject_CallMethod((PyObject *)reader, "_read_usage", "O", usage));
    }

    set_field(&reader->usage_counts, usage);
    int is_at_first_output = reader->output_events == 1 && !has_finish_reason(reader);
    if (is_at_first_output && reader->first_event_tokens == 0)
        reader->first_event_tokens = output_tokens;

    return 0;
}

/* Add the gap between the last output event and this one to the timeline, and note it if it is the
 * largest. Return 0, or -1 with an exception. */
static int count_gap(ResponseReader *reader, int64_t timestamp, int64_t uncertainty_ns)
{
    int64_t gap_ns = timestamp - reader->last_token;
    if (append_gap(reader->timeline, gap_ns) < 0)
        return -1;

    if (gap_ns > reader->max_gap) {
        reader->max_gap = gap_ns;
        reader->max_gap_uncertainty = uncertainty_ns;
    }

    return 0;
}

/* Count an event with output, usually one token, and note its timestamp and the gap before it.
 * Return 0, or -1 with an exception.
 *
 * `uncertainty_ns` is by how much the event may have arrived before `timestamp`. */
static int count_output_event(ResponseReader *reader, int64_t timestamp, int64_t uncertainty_ns)
{
    int is_first_output = reader->last_token == NEVER;
    if (is_first_output) {
        reader->first_token = timestamp;
        reader->first_token_uncertainty = uncertainty_ns;
    } else if (count_gap(reader, timestamp, uncertainty_ns) < 0)
        return -1;

    if (append_timestamp(reader->timeline, timestamp) < 0)
        return -1;

    reader->output_events++;
    reader->last_token = timestamp;
    reader->end = timestamp;

    return 0;
}

/* Keep the finish reason of an event. The response has ended at its timestamp, unless more output
 * follows. Return 0, or -1 with an exception. */
static int keep_finish_reason(ResponseReader *reader, const EventContent *event, int64_t timestamp)
{
    PyObject *reason =
        PyUnicode_DecodeUTF8(event->finish_reason, event->finish_reason_size, "strict");
    if (reason == NULL)
        return -1;
    set_field_stealing(&reader->finish_reason, reason);
    reader->end = timestamp;
    return 0;
}

/* Pass what one event says (output, finish reason, usage) to the reader of the response. Return 0,
 * or -1 with an exception.
 *
 * `uncertainty_ns` is by how much the event may have arrived before `timestamp`. */
static int feed_event(ResponseReader *reader, const EventContent *event, int64_t timestamp,
                      int64_t uncertainty_ns)
{
    if (event->has_answer && reader->first_answer == NEVER)
        reader->first_answer = timestamp;
    if (event->finish_reason != NULL && keep_finish_reason(reader, event, timestamp) < 0)
        return -1;
    if (event->has_output && count_output_event(reader, timestamp, uncertainty_ns) < 0)
        return -1;
    return event->usage == NULL ? 0 : feed_usage(reader, event->usage);
}

/* Pass events that came at `timestamp`, or earlier by at most `uncertainty_ns`, to the reader of
 * the response, as `ResponseReader.feed` does in Python. Return 0, or -1 with an exception. */
static int feed_events(ResponseReader *reader, const EventContent *events, int event_count,
                       int64_t timestamp, int64_t uncertainty_ns)
{
    if (event_count > 0 && reader->first_event == NEVER)
        reader->first_event = timestamp;
    for (int i = 0; i < event_count; i++) {
        if (feed_event(reader, &events[i], timestamp, uncertainty_ns) < 0)
            return -1;
    }
    return 0;
}

/* Return by how many ns the last output event may have arrived before its timestamp, if the end of
 * the response came in the same read.
 *
 * A server computes one output event per step, and sends the end of the response in the same step
 * as the last output or in the next one. The length of a step is the mean gap between two outputs.
 * So the uncertainty is at most that gap. With a single output event there is no gap, and
 * `uncertainty_ns` is returned as it is. */
static int64_t uncertainty_before_end(const ResponseReader *reader, int64_t timestamp,
                                      int64_t uncertainty_ns)
{
    int64_t gap_count = reader->output_events - 1;
    if (gap_count <= 0)
        return uncertainty_ns;
    int64_t mean_gap_ns = (timestamp - reader->first_token) / gap_count;
    return min_int64(uncertainty_ns, mean_gap_ns);
}

/* When the events of a read arrived. A read may hold several packets, and the timestamp is that of
 * the newest one. */
typedef struct {
    int64_t timestamp;
    int64_t uncertainty_ns; /* by how much an uncertain event may have arrived earlier */
    int uncertain_count;    /* number of uncertain events, which precede the certain ones */
    int is_one_write;       /* the server wrote all events at once, so that they arrived together */
} EventTiming;

/* The number of output events of a read, by whether their timestamps are uncertain. */
typedef struct {
    int64_t uncertain;
    int64_t certain;
} OutputCounts;

/* Pass the events of a read to the reader, and count those with output into `*outputs`.
 *
 * The first `timing->uncertain_count` events may have arrived before the timestamp of the read. The
 * others have arrived at it. Return 0, or -1 with an exception. */
static int feed_timed_events(ResponseReader *reader, const FastPathRead *fast_read,
                             const EventTiming *timing, OutputCounts *outputs)
{
    const EventContent *uncertain_events = fast_read->events;
    const EventContent *certain_events = uncertain_events + timing->uncertain_count;
    int certain_count = fast_read->event_count - timing->uncertain_count;

    int64_t outputs_before = reader->output_events;
    if (feed_events(reader, uncertain_events, timing->uncertain_count, timing->timestamp,
                    timing->uncertainty_ns) < 0)
        return -1;

    outputs->uncertain = reader->output_events - outputs_before;

    outputs_before = reader->output_events;
    if (feed_events(reader, certain_events, certain_count, timing->timestamp, 0) < 0)
        return -1;

    outputs->certain = reader->output_events - outputs_before;
    return 0;
}

/* Return whether the last output event of a read may have arrived before its timestamp. */
static int is_last_output_uncertain(const OutputCounts *outputs)
{
    return outputs->uncertain > 0 && outputs->certain == 0;
}

/* Note in the reader whether the time of the last output event of a read is uncertain, and by how
 * much it may have arrived earlier. Nothing is noted for a read without output events. */
static void note_last_output_uncertainty(ResponseReader *reader, const EventTiming *timing,
                                         const OutputCounts *outputs)
{
    int is_exact = outputs->certain > 0; /* The certain events follow the uncertain ones. */
    if (is_exact)
        reader->uncertain_timestamp = NEVER;

    if (!is_last_output_uncertain(outputs))
        return;

    reader->uncertain_timestamp = timing->timestamp;
    reader->timestamp_uncertainty = timing->uncertainty_ns;

    if (has_finish_reason(reader))
        reader->timestamp_uncertainty =
            uncertainty_before_end(reader, timing->timestamp, timing->uncertainty_ns);
}

/* Return how many output events of a read have an inexact time, which is recorded with them.
 *
 * Events of one write of the server have arrived together, so their times are exact. Otherwise the
 * uncertain ones are inexact, with one exception: servers send the end of a response so soon after
 * the last output that both often share a read, even if the client reads without delay. So the last
 * output is not counted if the finish reason came in the same read. */
static int64_t count_inexact_outputs(const ResponseReader *reader, const EventTiming *timing,
                                     const OutputCounts *outputs)
{
    if (timing->is_one_write)
        return 0;
    int is_last_output_exempt = is_last_output_uncertain(outputs) && has_finish_reason(reader);
    if (is_last_output_exempt)
        return outputs->uncertain - 1;
    return outputs->uncertain;
}

/* Pass the events of a read to the reader of the response, and note the uncertainties of their
 * timestamps, as `ResponseReader.feed_with_uncertainty` does in Python.
 *
 * They are noted for the last output event, for the largest gap between output events, and in the
 * event timeline, which collects the times of all output events. Return 0, or -1 with an
 * exception. */
static int feed_with_uncertainty(ResponseReader *reader, const FastPathRead *fast_read,
                                 const EventTiming *timing)
{
    int64_t max_gap_before_read = reader->max_gap;
    OutputCounts outputs;

    if (feed_timed_events(reader, fast_read, timing, &outputs) < 0)
        return -1;

    note_last_output_uncertainty(reader, timing, &outputs);

    int64_t inexact_outputs = count_inexact_outputs(reader, timing, &outputs);
    if (inexact_outputs != 0)
        return append_uncertainty(reader->timeline, timing->uncertainty_ns, inexact_outputs);

    int has_new_max_gap = reader->max_gap > max_gap_before_read;
    if (has_new_max_gap)
        reader->max_gap_uncertainty = 0; /* The gap ends in this read, whose times are exact. */

    return 0;
}

/* -- feeding reads to the exchange ------------------------------------------------------------- */

/* Return how many of the first events of a read may have arrived before its timestamp, which is the
 * arrival of its newest packet.
 *
 * There are three cases, in which A and B are events:
 * 1. The read is A, B and the end of the response. The newest packet may have only this end, so
 *    both events are uncertain.
 * 2. A and B are one chunk, which a server writes at once. Both arrived with the newest packet.
 * 3. A and B are two chunks. B arrived with the newest packet, and A is uncertain. */
static int count_uncertain_events(const FastPathRead *fast_read)
{
    if (fast_read->has_end)
        return fast_read->event_count;
    int is_one_chunk = fast_read->chunk_count == 1;
    return is_one_chunk ? 0 : fast_read->event_count - 1;
}

/* Note how late the first output was read, and call `on_first_output` with its time.
 *
 * The lag, `client_lag`, is the delay between the arrival of the first output and its reading.
 * Return 0, or -1 with an exception. */
static int report_first_output(Exchange *exchange, const ResponseReader *reader, const Read *read)
{
    exchange->client_lag = read->read_at - read->timestamp;
    if (exchange->on_first_output == Py_None)
        return 0;
    return discard_result(
        PyObject_CallFunction(exchange->on_first_output, "L", reader->first_token));
}

/* Return when the events of a read arrived. None of them arrived before `earliest_arrival`. */
static EventTiming event_timing(const FastPathRead *fast_read, const Read *read,
                                int64_t earliest_arrival)
{
    return (EventTiming){
        .timestamp = read->timestamp,
        .uncertainty_ns = read->timestamp - earliest_arrival,
        .uncertain_count = count_uncertain_events(fast_read),
        .is_one_write = fast_read->chunk_count == 1, /* A server writes a chunk at once. */
    };
}

/* Pass the events of a read to the reader of a response that had no output before this read, and
 * report the first output if it has come.
 *
 * The socket was last known to be empty at `read->empty_at`, and the response cannot have begun
 * before the request was sent. The events have arrived since the later of both times. Return 0, or
 * -1 with an exception. */
static int feed_before_first_output(Exchange *exchange, ResponseReader *reader,
                                    const FastPathRead *fast_read, const Read *read)
{
    int64_t earliest_arrival = max_int64(read->empty_at, exchange->sent_at);
    const EventTiming timing = event_timing(fast_read, read, earliest_arrival);
    if (feed_with_uncertainty(reader, fast_read, &timing) < 0)
        return -1;
    int has_first_output = reader->first_token != NEVER;
    return has_first_output ? report_first_output(exchange, reader, read) : 0;
}

/* Pass the events of a read to the reader of the response, with the uncertainty of their times.
 * Return 0, or -1 with an exception.
 *
 * There are three cases:
 * - Before the first output, the uncertainty matters most: it is that of the time to first token.
 * - Later, the events of a single chunk are exact, because the server wrote them at once.
 * - The events of several chunks may have arrived one by one since the socket was last known to be
 *   empty. */
static int feed_read_events(Exchange *exchange, ResponseReader *reader,
                            const FastPathRead *fast_read, const Read *read)
{
    int has_first_output = reader->first_token != NEVER;
    if (!has_first_output)
        return feed_before_first_output(exchange, reader, fast_read, read);

    int is_one_chunk = fast_read->chunk_count == 1;
    if (is_one_chunk)
        return feed_events(reader, fast_read->events, fast_read->event_count, read->timestamp, 0);

    const EventTiming timing = event_timing(fast_read, read, read->empty_at);
    return feed_with_uncertainty(reader, fast_read, &timing);
}

/* Return 1 if a complete response has succeeded for certain: it has events, no error, and a finish
 * reason that ends a response normally. Return 0 if Python has to decide, or -1 with an
 * exception. */
static int has_succeeded(const ResponseReader *reader)
{
    int has_error = PyObject_Size(reader->error) > 0 || PyObject_Size(reader->parse_error) > 0;
    int has_events = reader->first_event != NEVER;
    if (has_error || !has_events)
        return 0;
    return PySet_Contains(normal_finish_reasons, reader->finish_reason);
}

/* Return why a complete stream of events is a failure, or None if it has succeeded, by the method
 * of the reader in Python. The result is a new reference, or NULL with an exception. */
static PyObject *find_failure_in_python(ResponseReader *reader)
{
    PyObject *is_framing_complete = Py_True;
    PyObject *ends_with_connection = Py_False;
    PyObject *is_stream = Py_True;
    return PyObject_CallMethod((PyObject *)reader, "find_failure", "OOO", is_framing_complete,
                               ends_with_connection, is_stream);
}

/* End the exchange after a complete response: set its failure, and the time at which it was done.
 *
 * The failure is None if the response has succeeded. `Exchange._finish_response` does the same in
 * Python. Return 0, or -1 with an exception. */
static int finish_response(Exchange *exchange, ResponseReader *reader, int64_t timestamp)
{
    int is_success = has_succeeded(reader);
    if (is_success < 0)
        return -1;

    if (is_success)
        set_field(&exchange->failure, Py_None);
    else {
        PyObject *failure = find_failure_in_python(reader);
        if (failure == NULL)
            return -1;
        set_field_stealing(&exchange->failure, failure);
    }

    exchange->done_at = timestamp;
    return 0;
}

/* Take over the fields of a parsed head (a tuple `ResponseHead`), which came with this read.
 *
 * `is_stream_head` has checked the head: it is that of a chunked stream of events. Python parsed
 * its status from three digits, so that reading it as a number cannot fail. */
static void apply_head(Exchange *exchange, ResponseParser *response, PyObject *head,
                       const Read *read)
{
    int64_t status;

    read_int64(PyTuple_GetItem(head, HEAD_STATUS), &status);
    response->status = status;
    set_field(&response->headers, PyTuple_GetItem(head, HEAD_HEADERS));
    set_field(&response->_mode, PyTuple_GetItem(head, HEAD_MODE));
    set_field(&response->_bytes_left, PyTuple_GetItem(head, HEAD_LENGTH));
    set_field(&response->uses_left, PyTuple_GetItem(head, HEAD_USES_LEFT));
    set_field(&response->idle_limit_s, PyTuple_GetItem(head, HEAD_IDLE_LIMIT));
    response->is_reusable = PyTuple_GetItem(head, HEAD_REUSABLE) == Py_True;

    /* Every head of a chunked stream of events means this. */
    response->is_chunked = 1;
    response->ends_with_connection = 0;
    exchange->is_event_stream = 1;
    exchange->is_at_chunk_start = 1;

    exchange->head_received_at = read->timestamp;
    exchange->has_kernel_timestamp = read->from_kernel;
}

/* Note that the last chunk of a response has come, and nothing after it. */
static void apply_end(Exchange *exchange, ResponseParser *response)
{
    set_field(&response->_mode, mode_end);
    set_field(&response->surplus, no_bytes);
    response->is_complete = 1;
    exchange->is_at_chunk_start = 0;
}

/* Update an exchange (a request with its response) by a read that was parsed on the fast path.
 *
 * The parts of the read are applied in this order: its head, the end of the response, and its
 * events. The end comes before the events, because it says that no byte of another event follows.
 *
 * Return RESPONSE_OVER if it was the last read of the response, else RESPONSE_GOES_ON, or
 * FEED_FAILED with an exception. */
static enum FeedResult apply_fast_path_read(Exchange *exchange, ResponseParser *response,
                                            ResponseReader *reader, const FastPathRead *fast_read,
                                            const Read *read)
{
    exchange->bytes_received += read->size;
    if (fast_read->head != NULL)
        apply_head(exchange, response, fast_read->head, read);

    if (fast_read->chunk_count > 0)
        ((SseDecoder *)exchange->decoder)->has_started = 1;

    if (fast_read->has_end)
        apply_end(exchange, response);

    if (fast_read->event_count > 0) {
        if (feed_read_events(exchange, reader, fast_read, read) < 0)
            return FEED_FAILED;
        exchange->last_event_read_at = read->read_at;
    }
    if (!fast_read->has_end)
        return RESPONSE_GOES_ON;

    int status = finish_response(exchange, reader, read->timestamp);
    return status < 0 ? FEED_FAILED : RESPONSE_OVER;
}

/* Return whether the parsers of an exchange are of the registered classes, of which C knows the
 * fields. */
static int has_known_parsers(const Exchange *exchange)
{
    return Py_TYPE(exchange->response) == response_class &&
           Py_TYPE(exchange->decoder) == decoder_class && Py_TYPE(exchange->reader) == reader_class;
}

/* Feed a read to an exchange (a request with its response) on the fast path, without calling
 * Python.
 *
 * Return RESPONSE_OVER, RESPONSE_GOES_ON, or FEED_FAILED with an exception. Return NOT_FAST_PATH,
 * after which nothing has changed, if the read is not of the most common kind. */
static enum FeedResult try_feed_on_fast_path(Exchange *exchange, const Read *read)
{
    if (!has_known_parsers(exchange))
        return NOT_FAST_PATH;

    FastPathRead fast_read; /* The next call initialises it. */

    enum FeedResult result = NOT_FAST_PATH;
    if (parse_fast_path_read(exchange, read, &fast_read)) {
        PyObject *response = exchange->response;
        PyObject *reader = exchange->reader;

        /* `on_first_output` may send the request again, which gives the exchange a new parser and a
         * new reader. The ones in use must stay alive until this read is processed. */
        Py_INCREF(response);
        Py_INCREF(reader);
        result = apply_fast_path_read(exchange, (ResponseParser *)response,
                                      (ResponseReader *)reader, &fast_read, read);
        Py_DECREF(response);
        Py_DECREF(reader);
    }

    release_usages(&fast_read);
    return result;
}

/* -- feeding reads in any form ----------------------------------------------------------------- */

/* Fill in `*read` from the tuple `Read` of Python. Return 1, or 0 if the value is something else.
 *
 * The bytes are not copied, so the tuple must live as long as `*read` is used. */
static int parse_read_tuple(PyObject *tuple, Read *read)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != READ_ITEM_COUNT)
        return 0;

    PyObject *data = PyTuple_GetItem(tuple, READ_DATA);
    if (!PyBytes_Check(data))
        return 0;

    read->data = PyBytes_AsString(data);
    read->size = PyBytes_Size(data);
    read->from_kernel = PyTuple_GetItem(tuple, READ_FROM_KERNEL) == Py_True;

    return read_int64(PyTuple_GetItem(tuple, READ_TIMESTAMP), &read->timestamp) &&
           read_int64(PyTuple_GetItem(tuple, READ_READ_AT), &read->read_at) &&
           read_int64(PyTuple_GetItem(tuple, READ_EMPTY_AT), &read->empty_at);
}

/* Call a method of the exchange in Python with the items of a tuple as arguments. Return its result
 * (a new reference), or NULL with an exception. */
static PyObject *call_exchange_method(Exchange *exchange, const char *method_name, PyObject *items)
{
    PyObject *arguments = PySequence_Tuple(items);
    if (arguments == NULL)
        return NULL;

    PyObject *result = NULL;
    PyObject *method = PyObject_GetAttrString((PyObject *)exchange, method_name);
    if (method != NULL) {
        result = PyObject_CallObject(method, arguments);
        Py_DECREF(method);
    }

    Py_DECREF(arguments);
    return result;
}

/* Feed a tuple `Read` to an exchange by its method in Python, which returns whether the response is
 * over. */
static enum FeedResult feed_read_in_python(Exchange *exchange, PyObject *tuple)
{
    PyObject *result = call_exchange_method(exchange, "_feed_read", tuple);
    if (result == NULL)
        return FEED_FAILED;

    int is_over = PyObject_IsTrue(result);
    Py_DECREF(result);
    if (is_over < 0)
        return FEED_FAILED;

    return is_over ? RESPONSE_OVER : RESPONSE_GOES_ON;
}

/* Feed a tuple `PlainRun` to an exchange by its method in Python. It stands for reads of plain
 * events, which never end a response. */
static enum FeedResult feed_plain_run_in_python(Exchange *exchange, PyObject *tuple)
{
    int status = discard_result(call_exchange_method(exchange, "_feed_plain_run", tuple));
    return status < 0 ? FEED_FAILED : RESPONSE_GOES_ON;
}

/* Feed a read to an exchange (a request with its response), in C if possible, else by its method in
 * Python. Return RESPONSE_OVER, RESPONSE_GOES_ON, or FEED_FAILED with an exception. */
static enum FeedResult feed_read(Exchange *exchange, const Read *read)
{
    enum FeedResult result = try_feed_on_fast_path(exchange, read);
    if (result != NOT_FAST_PATH)
        return result;

    PyObject *tuple = new_read_tuple(read);
    if (tuple == NULL)
        return FEED_FAILED;

    result = feed_read_in_python(exchange, tuple);
    Py_DECREF(tuple);
    return result;
}

/* Feed a tuple to an exchange (a request with its response). It is a `Read`, which is one read of a
 * socket, or a `PlainRun`, which stands for several reads whose events were only counted.
 *
 * A `Read` has five items and a `PlainRun` three. A `Read` that is not of the most common kind is
 * fed by the method of the exchange in Python, and so is every `PlainRun`. */
static enum FeedResult feed_tuple(Exchange *exchange, PyObject *tuple)
{
    enum { PLAIN_RUN_ITEM_COUNT = 3 };
    Py_ssize_t item_count = PySequence_Size(tuple);
    if (item_count < 0)
        return FEED_FAILED;

    int is_plain_run = item_count == PLAIN_RUN_ITEM_COUNT;
    if (is_plain_run)
        return feed_plain_run_in_python(exchange, tuple);

    Read read;
    if (!parse_read_tuple(tuple, &read))
        return feed_read_in_python(exchange, tuple);

    enum FeedResult result = try_feed_on_fast_path(exchange, &read);
    return result == NOT_FAST_PATH ? feed_read_in_python(exchange, tuple) : result;
}

/* Note how the receiver may treat the next reads of a response that goes on.
 *
 * - `can_batch_reads`: The receiver may collect several reads and pass them on together. Nobody
 *   waits for single events after the first output, unless there is a function `on_output`.
 * - `has_split_chunks`: The server writes a chunk in several parts. This becomes true when a read
 *   ends within a chunk after the first output, and stays true until the end of the response.
 * - `template`: The bytes around the text of an event. By them the receiver recognises events that
 *   it only has to count. It is None while a read that begins now would begin within a chunk. */
static void update_batching(Exchange *exchange)
{
    const ResponseReader *reader = (ResponseReader *)exchange->reader;
    const ResponseParser *response = (ResponseParser *)exchange->response;
    int is_chunked_stream = exchange->is_event_stream && response->is_chunked;
    int has_first_output = reader->first_token != NEVER;
    int wants_each_event = exchange->on_output != Py_None;
    exchange->can_batch_reads = is_chunked_stream && has_first_output && !wants_each_event;

    if (exchange->is_at_chunk_start) {
        set_field(&exchange->template, reader->template);
        return;
    }

    set_field(&exchange->template, Py_None);
    if (exchange->can_batch_reads)
        exchange->has_split_chunks = 1;
}

/* Close the connection after this response instead of using it again, because the server sent bytes
 * after the end of the response. */
static void forbid_reuse_of_connection(Exchange *exchange)
{
    ((ResponseParser *)exchange->response)->is_reusable = 0;
}

/* Feed a sequence of tuples `Read` and `PlainRun` to an exchange, in their order, until the
 * response is over. */
static enum FeedResult feed_read_sequence(Exchange *exchange, PyObject *reads)
{
    Py_ssize_t count = PySequence_Size(reads);
    if (count < 0)
        return FEED_FAILED;

    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tuple = PySequence_GetItem(reads, i);
        if (tuple == NULL)
            return FEED_FAILED;

        enum FeedResult result = feed_tuple(exchange, tuple);
        Py_DECREF(tuple);
        int has_bytes_after_end = result == RESPONSE_OVER && i + 1 < count;
        if (has_bytes_after_end)
            forbid_reuse_of_connection(exchange);

        if (result != RESPONSE_GOES_ON)
            return result;
    }

    update_batching(exchange);
    return RESPONSE_GOES_ON;
}

/* Feed a linked list of reads to an exchange (a request with its response), in their order, until
 * the response is over. The caller frees the list.
 *
 * If reads are left after the end of the response, the server has sent too much, and the connection
 * is not used again. */
static enum FeedResult feed_waiting_reads(Exchange *exchange, const WaitingRead *waiting)
{
    for (; waiting != NULL; waiting = waiting->next) {
        enum FeedResult result = feed_read(exchange, &waiting->read);
        if (result == RESPONSE_GOES_ON)
            continue;
        int has_more_reads = waiting->next != NULL;
        if (result == RESPONSE_OVER && has_more_reads)
            forbid_reuse_of_connection(exchange);
        return result;
    }

    update_batching(exchange);
    return RESPONSE_GOES_ON;
}

/* ExchangeState.feed_reads(reads): process the reads of a response, tuples `Read` and `PlainRun`,
 * in their order. Return True if the response is over, else False. */
static PyObject *exchange_feed_reads(PyObject *self, PyObject *reads)
{
    enum FeedResult result = feed_read_sequence((Exchange *)self, reads);
    return result == FEED_FAILED ? NULL : PyBool_FromLong(result == RESPONSE_OVER);
}
