/* The Python module. Functions take numbers and return a phx_result; engines/shm.py is the only caller. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "phx.h"
#include "kernels.h"

/* -- groups: one capsule each. A call acquires the handle; the last one to release it after `leave` frees the group */

#define NAME "phalanx.collectives.process_group.group"

struct handle {
    phx_group *group;
    long calls; /* in progress, in all threads; guarded by the GIL */
    int left;
};

static struct handle *acquire(PyObject *capsule) {
    struct handle *h = PyCapsule_GetPointer(capsule, NAME);
    if (!h) return NULL;
    if (h->left) {
        PyErr_SetString(PyExc_ValueError, "this process has left the group");
        return NULL;
    }
    if (!phx_is_owner(h->group)) {
        PyErr_SetString(PyExc_ValueError, "this group belongs to the process that joined it, not to its forks");
        return NULL;
    }
    h->calls++;
    return h;
}

static void release(struct handle *h) {
    if (--h->calls || !h->left) return;
    phx_group *g = h->group;
    h->group = NULL;
    Py_BEGIN_ALLOW_THREADS
    phx_leave(g);
    Py_END_ALLOW_THREADS
}

static void destroy_capsule(PyObject *capsule) {
    struct handle *h = PyCapsule_GetPointer(capsule, NAME);
    if (h->group) phx_leave(h->group); /* no call is in progress: it would hold a reference */
    free(h);
}

/* A thread that waits in `join` has no group to abort yet: it gives up when this counter changes. */
static _Atomic uint64_t join_aborts;
static _Thread_local uint64_t joining; /* 1 + the counter when this thread began to wait; 0: it is not waiting */

static PyObject *py_abort_joining(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    atomic_fetch_add(&join_aborts, 1);
    Py_RETURN_NONE;
}

/* Run Python's signal handlers, for Ctrl-C and others; return whether one raised. */
static int interrupted(void) {
    if (joining && joining != atomic_load(&join_aborts) + 1) return 1;
    PyGILState_STATE state = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised;
}

/* Calls in progress in this thread. There are several if a signal handler, which runs while one waits, makes another call. */
struct nested_call {
    struct handle *handle;
    struct nested_call *outer;
};
static _Thread_local struct nested_call *innermost;

/* A nested call on the same group would wait forever: the outer one cannot finish before the handler returns. */
static int would_deadlock(const struct handle *h) {
    const struct nested_call *w = innermost;
    while (w && w->handle != h) w = w->outer;
    if (w)
        PyErr_SetString(PyExc_RuntimeError, "a signal handler cannot run a collective on a group on which its thread is already "
                                            "waiting; set a flag in the handler and run the collective later");
    return w != NULL;
}

static int run(struct handle *h, const struct phx_call *call) {
    struct nested_call own = {h, innermost};
    int result;
    innermost = &own;
    Py_BEGIN_ALLOW_THREADS
    result = phx_run(h->group, call);
    Py_END_ALLOW_THREADS
    innermost = own.outer;
    return result;
}

/* -- arguments */

static int64_t as_int(PyObject *o) { return PyLong_AsLongLong(o); }

static int wrong_count(const char *name, Py_ssize_t have, Py_ssize_t want) {
    if (have == want) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, want, have);
    return 1;
}

/* End a call: return its result, or NULL if a signal handler raised. */
static PyObject *finish_call(struct handle *h, int64_t result) {
    release(h);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(result);
}

/* Parse (address, bytes, address, bytes, ...). Return NULL if it is empty, or with an error set. */
static struct phx_part *parse_parts(PyObject *flat, int *count) {
    Py_ssize_t n = PyTuple_Size(flat);
    *count = 0;
    if (n <= 0) return NULL;
    struct phx_part *all = malloc((size_t)(n / 2 + 1) * sizeof *all);
    if (!all) return (struct phx_part *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i + 1 < n; i += 2) {
        all[i / 2].at = PyLong_AsVoidPtr(PyTuple_GetItem(flat, i));
        all[i / 2].bytes = PyLong_AsSize_t(PyTuple_GetItem(flat, i + 1));
    }
    *count = (int)(n / 2);
    return all;
}

/* group, kind, dtype, op, root, scale, average, timeout_ms, ins, outs */
struct call_args {
    struct handle *handle;
    struct phx_call call;
    struct phx_part *in, *out;
};

static int call_args(struct call_args *r, const char *name, PyObject *const *args, Py_ssize_t n) {
    if (wrong_count(name, n, 10)) return -1;
    struct phx_call *c = &r->call;
    c->kind = (int)as_int(args[1]), c->dtype = (int)as_int(args[2]), c->op = (int)as_int(args[3]);
    c->root = (int)as_int(args[4]), c->scale = PyFloat_AsDouble(args[5]), c->average = PyObject_IsTrue(args[6]);
    c->timeout_ms = as_int(args[7]);
    c->in = r->in = parse_parts(args[8], &c->ins);
    c->out = r->out = PyErr_Occurred() ? NULL : parse_parts(args[9], &c->outs);
    if (!PyErr_Occurred() && (r->handle = acquire(args[0]))) {
        const char *problem = phx_validate(r->handle->group, c);
        if (!problem) return 0;
        PyErr_SetString(PyExc_ValueError, problem);
        release(r->handle);
    }
    free(r->in);
    free(r->out);
    return -1;
}

/* -- join and leave */

static PyObject *py_memory(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (wrong_count("memory", n, 2)) return NULL;
    int64_t ranks = as_int(args[0]), slot = as_int(args[1]);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(phx_memory((int)ranks, (size_t)slot));
}

static PyObject *py_join(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* fd, rank, ranks, slot, pids, direct, timeout_ms */
    (void)self;
    if (wrong_count("join", n, 7)) return NULL;
    int64_t fd = as_int(args[0]), rank = as_int(args[1]), ranks = as_int(args[2]), slot = as_int(args[3]), timeout_ms = as_int(args[6]);
    int direct = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (ranks < 1 || ranks > PHX_MAX_RANKS || rank < 0 || rank >= ranks || slot < 1 || PySequence_Size(args[4]) != ranks) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "invalid group: rank %d of %d (at most %d), expected one pid per rank", (int)rank, (int)ranks, PHX_MAX_RANKS);
        return NULL;
    }
    int32_t pids[PHX_MAX_RANKS];
    for (int64_t r = 0; r < ranks; r++) {
        PyObject *pid = PySequence_GetItem(args[4], r);
        if (!pid) return NULL;
        pids[r] = (int32_t)as_int(pid);
        Py_DecRef(pid);
    }
    struct handle *h = PyErr_Occurred() ? NULL : calloc(1, sizeof *h);
    if (!h) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    int why;
    joining = atomic_load(&join_aborts) + 1;
    Py_BEGIN_ALLOW_THREADS
    h->group = phx_join((int)fd, (int)rank, (int)ranks, (size_t)slot, pids, direct, timeout_ms, interrupted);
    why = errno;
    Py_END_ALLOW_THREADS
    joining = 0;
    PyObject *capsule = h->group ? PyCapsule_New(h, NAME, destroy_capsule) : NULL;
    if (capsule) return capsule;
    if (h->group) phx_leave(h->group);
    free(h);
    errno = why;
    return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *py_leave(PyObject *self, PyObject *capsule) { /* returns whether the group was freed: no call was in progress */
    (void)self;
    struct handle *h = PyCapsule_GetPointer(capsule, NAME);
    if (!h) return NULL;
    if (!h->left) {
        h->left = 1;
        h->calls++;
        if (phx_is_owner(h->group)) phx_announce_leave(h->group); /* calls in progress return; the last of them frees the group */
        release(h);
    }
    return PyBool_FromLong(!h->group);
}

static PyObject *py_abort(PyObject *self, PyObject *capsule) {
    (void)self;
    struct handle *h = acquire(capsule);
    if (!h) return NULL;
    phx_abort(h->group);
    release(h);
    Py_RETURN_NONE;
}

static PyObject *py_failed_ranks(PyObject *self, PyObject *capsule) { /* [rank, ...] */
    (void)self;
    struct handle *h = acquire(capsule);
    if (!h) return NULL;
    uint8_t failed[PHX_MAX_RANKS] = {0};
    phx_failed_ranks(h->group, failed);
    release(h);
    PyObject *list = PyList_New(0);
    for (int r = 0; list && r < PHX_MAX_RANKS; r++) {
        if (!failed[r]) continue;
        PyObject *rank = PyLong_FromLong(r);
        if (!rank || PyList_Append(list, rank)) {
            Py_DecRef(list);
            list = NULL;
        }
        Py_DecRef(rank);
    }
    return list;
}

static PyObject *py_signature(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* kind, dtype, op, root, average, bytes, scale */
    (void)self;
    if (wrong_count("signature", n, 2)) return NULL;
    int64_t rank = as_int(args[1]);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    if (!h) return NULL;
    struct phx_signature signature = {0};
    phx_signature(h->group, (int)rank, &signature);
    release(h);
    return Py_BuildValue("(iiiiiKd)", signature.kind, signature.dtype, signature.op, signature.root, signature.average, (unsigned long long)signature.bytes, signature.scale);
}

static PyObject *py_direct(PyObject *self, PyObject *capsule) {
    (void)self;
    struct handle *h = acquire(capsule);
    if (!h) return NULL;
    int direct = phx_direct(h->group);
    release(h);
    return PyBool_FromLong(direct);
}

/* -- collectives */

static PyObject *run_one(struct handle *h, const struct phx_call *call) {
    const char *problem = phx_validate(h->group, call);
    if (problem) {
        PyErr_SetString(PyExc_ValueError, problem);
        return finish_call(h, 0);
    }
    return finish_call(h, would_deadlock(h) ? 0 : run(h, call));
}

/* group, address, count, dtype, op, scale, average, timeout_ms */
static PyObject *py_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (wrong_count("all_reduce", n, 8)) return NULL;
    struct phx_part part = {PyLong_AsVoidPtr(args[1]), 0};
    struct phx_call call = {.kind = PHX_ALL_REDUCE, .outs = 1, .out = &part};
    size_t count = PyLong_AsSize_t(args[2]);
    call.dtype = (int)as_int(args[3]), call.op = (int)as_int(args[4]), call.scale = PyFloat_AsDouble(args[5]);
    call.average = PyObject_IsTrue(args[6]), call.timeout_ms = as_int(args[7]);
    part.bytes = count * phx_itemsize(call.dtype);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    return h ? run_one(h, &call) : NULL;
}

/* group, address, bytes, dtype, root, timeout_ms */
static PyObject *py_broadcast(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (wrong_count("broadcast", n, 6)) return NULL;
    struct phx_part part = {PyLong_AsVoidPtr(args[1]), PyLong_AsSize_t(args[2])};
    struct phx_call call = {.kind = PHX_BROADCAST, .scale = 1.0, .outs = 1, .out = &part};
    call.dtype = (int)as_int(args[3]), call.root = (int)as_int(args[4]), call.timeout_ms = as_int(args[5]);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    return h ? run_one(h, &call) : NULL;
}

static PyObject *py_barrier(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, timeout_ms */
    (void)self;
    if (wrong_count("barrier", n, 2)) return NULL;
    struct phx_call call = {.kind = PHX_BARRIER, .scale = 1.0, .timeout_ms = as_int(args[1])};
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    return h ? run_one(h, &call) : NULL;
}

static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    struct call_args r = {0};
    if (call_args(&r, "run", args, n)) return NULL;
    int result = would_deadlock(r.handle) ? 0 : run(r.handle, &r.call);
    free(r.in);
    free(r.out);
    return finish_call(r.handle, result);
}

static PyObject *py_start(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* a ticket */
    (void)self;
    struct call_args r = {0};
    if (call_args(&r, "start", args, n)) return NULL;
    uint64_t ticket = phx_start(r.handle->group, &r.call);
    free(r.in);
    free(r.out);
    if (!ticket) PyErr_NoMemory();
    return finish_call(r.handle, (int64_t)ticket);
}

static PyObject *py_done(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, ticket */
    (void)self;
    if (wrong_count("done", n, 2)) return NULL;
    int64_t ticket = as_int(args[1]);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    return h ? finish_call(h, phx_done(h->group, (uint64_t)ticket)) : NULL;
}

static PyObject *py_wait(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, ticket, ms: a phx_result, or -1 */
    (void)self;
    if (wrong_count("wait", n, 3)) return NULL;
    int64_t ticket = as_int(args[1]), timeout_ms = as_int(args[2]);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    if (!h) return NULL;
    if (!phx_done(h->group, (uint64_t)ticket) && would_deadlock(h)) return finish_call(h, 0);
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = phx_wait(h->group, (uint64_t)ticket, timeout_ms);
    Py_END_ALLOW_THREADS
    return finish_call(h, result);
}

/* -- regions */

/* group, number, bytes, (local address, remote address, ...) */
static PyObject *py_add_region(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (wrong_count("add_region", n, 4)) return NULL;
    void *local[PHX_MAX_RANKS];
    uint64_t remote[PHX_MAX_RANKS];
    uint32_t name = (uint32_t)as_int(args[1]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    Py_ssize_t places = PyTuple_Size(args[3]) / 2;
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    if (!h) return NULL;
    for (Py_ssize_t r = 0; r < places && r < PHX_MAX_RANKS; r++) {
        local[r] = PyLong_AsVoidPtr(PyTuple_GetItem(args[3], 2 * r));
        remote[r] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[3], 2 * r + 1));
    }
    if (!PyErr_Occurred() && places != phx_ranks(h->group)) PyErr_SetString(PyExc_ValueError, "expected two addresses per rank");
    if (!PyErr_Occurred() && phx_add_region(h->group, name, bytes, local, remote)) PyErr_NoMemory();
    return finish_call(h, 0);
}

static PyObject *py_remove_region(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, number */
    (void)self;
    if (wrong_count("remove_region", n, 2)) return NULL;
    int64_t name = as_int(args[1]);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    if (!h) return NULL;
    phx_remove_region(h->group, (uint32_t)name);
    return finish_call(h, 0);
}

/* out, inputs (addresses), count, dtype, op, scale, average: without a group, to test the arithmetic */
static PyObject *py_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (wrong_count("reduce", n, 7)) return NULL;
    const void *inputs[PHX_MAX_RANKS];
    Py_ssize_t ranks = PyTuple_Size(args[1]);
    for (Py_ssize_t r = 0; r < ranks && r < PHX_MAX_RANKS; r++) inputs[r] = PyLong_AsVoidPtr(PyTuple_GetItem(args[1], r));
    void *out = PyLong_AsVoidPtr(args[0]);
    size_t count = PyLong_AsSize_t(args[2]);
    int dtype = (int)as_int(args[3]), op = (int)as_int(args[4]), average = PyObject_IsTrue(args[6]);
    double scale = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (ranks < 1 || ranks > PHX_MAX_RANKS || !phx_has_reduction(dtype, op)) {
        PyErr_SetString(PyExc_ValueError, "unsupported reduction");
        return NULL;
    }
    phx_reduce(out, inputs, (int)ranks, count, dtype, op, scale, average);
    Py_RETURN_NONE;
}

/* -- point-to-point */

/* group, address, bytes, peer, tag, timeout_ms */
struct p2p_args {
    struct handle *handle;
    void *at;
    size_t bytes;
    int peer;
    int64_t tag, timeout_ms;
};

static int p2p_args(struct p2p_args *a, const char *name, PyObject *const *args, Py_ssize_t n) {
    if (wrong_count(name, n, 6)) return -1;
    a->at = PyLong_AsVoidPtr(args[1]), a->bytes = PyLong_AsSize_t(args[2]), a->peer = (int)as_int(args[3]);
    a->tag = as_int(args[4]), a->timeout_ms = as_int(args[5]);
    a->handle = PyErr_Occurred() ? NULL : acquire(args[0]);
    return a->handle ? 0 : -1;
}

static PyObject *ticket_of(struct handle *h, uint64_t ticket) {
    if (!ticket) PyErr_SetString(PyExc_ValueError, "no such rank in the group, or out of memory");
    return finish_call(h, (int64_t)ticket);
}

static PyObject *py_send(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* a ticket */
    (void)self;
    struct p2p_args a;
    if (p2p_args(&a, "send", args, n)) return NULL;
    return ticket_of(a.handle, phx_send(a.handle->group, a.at, a.bytes, a.peer, a.tag, a.timeout_ms));
}

static PyObject *py_recv(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* a ticket */
    (void)self;
    struct p2p_args a;
    if (p2p_args(&a, "recv", args, n)) return NULL;
    uint64_t ticket;
    Py_BEGIN_ALLOW_THREADS /* may read a message that has arrived already */
    ticket = phx_recv(a.handle->group, a.at, a.bytes, a.peer, a.tag, a.timeout_ms);
    Py_END_ALLOW_THREADS
    return ticket_of(a.handle, ticket);
}

static PyObject *py_p2p_done(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, ticket */
    (void)self;
    if (wrong_count("p2p_done", n, 2)) return NULL;
    int64_t ticket = as_int(args[1]);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    return h ? finish_call(h, phx_p2p_done(h->group, (uint64_t)ticket)) : NULL;
}

/* group, ticket, ms: a phx_result or -1, a rank, bytes */
static PyObject *py_p2p_wait(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (wrong_count("p2p_wait", n, 3)) return NULL;
    int64_t ticket = as_int(args[1]), timeout_ms = as_int(args[2]);
    struct handle *h = PyErr_Occurred() ? NULL : acquire(args[0]);
    if (!h) return NULL;
    int result, from;
    size_t bytes;
    Py_BEGIN_ALLOW_THREADS
    result = phx_p2p_wait(h->group, (uint64_t)ticket, timeout_ms, &from, &bytes);
    Py_END_ALLOW_THREADS
    release(h);
    return PyErr_Occurred() ? NULL : Py_BuildValue("(iin)", result, from, (Py_ssize_t)bytes);
}

#define FAST(name, function) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}
#define ONE(name, function) {name, function, METH_O, NULL}

static PyMethodDef methods[] = {
    FAST("memory", py_memory),
    FAST("join", py_join),
    ONE("leave", py_leave),
    ONE("abort", py_abort),
    {"abort_joining", py_abort_joining, METH_NOARGS, NULL},
    ONE("failed_ranks", py_failed_ranks),
    FAST("signature", py_signature),
    ONE("direct", py_direct),
    FAST("all_reduce", py_all_reduce),
    FAST("broadcast", py_broadcast),
    FAST("barrier", py_barrier),
    FAST("run", py_run),
    FAST("start", py_start),
    FAST("done", py_done),
    FAST("wait", py_wait),
    FAST("add_region", py_add_region),
    FAST("remove_region", py_remove_region),
    FAST("reduce", py_reduce),
    FAST("send", py_send),
    FAST("recv", py_recv),
    FAST("p2p_done", py_p2p_done),
    FAST("p2p_wait", py_p2p_wait),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
