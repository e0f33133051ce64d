/* The library as a Python module: numbers in, a phx_result out. What they mean is said in shared.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "phx.h"
#include "reduce.h"

/* -- groups: a capsule each. Who calls holds it, and the last who lets go of one that was left ends it */

#define NAME "phalanx.collectives.group"

struct holder {
    phx_group *group;
    long calls; /* under way, in all threads; the interpreter's lock guards it */
    int left;
};

static struct holder *hold(PyObject *capsule) {
    struct holder *h = PyCapsule_GetPointer(capsule, NAME);
    if (!h) return NULL;
    if (h->left) {
        PyErr_SetString(PyExc_ValueError, "this group was left");
        return NULL;
    }
    if (!phx_own(h->group)) {
        PyErr_SetString(PyExc_ValueError, "this group belongs to the process that made it, and not to its forks");
        return NULL;
    }
    h->calls++;
    return h;
}

static void let_go(struct holder *h) {
    if (--h->calls || !h->left) return;
    phx_group *g = h->group;
    h->group = NULL;
    Py_BEGIN_ALLOW_THREADS
    phx_leave(g);
    Py_END_ALLOW_THREADS
}

static void dropped(PyObject *capsule) {
    struct holder *h = PyCapsule_GetPointer(capsule, NAME);
    if (h->group) phx_leave(h->group); /* nobody calls: who does has a reference */
    free(h);
}

/* Who waits in `join` has no group yet that could be aborted: all of them give up when this changes. */
static _Atomic uint64_t joinings;
static _Thread_local uint64_t joining; /* 1 + that, as it was when this thread began to wait; 0: it does not */

static PyObject *py_abort_joining(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    atomic_fetch_add(&joinings, 1);
    Py_RETURN_NONE;
}

/* Ctrl-C, and whatever else Python has to do when a signal has come. */
static int interrupted(void) {
    if (joining && joining != atomic_load(&joinings) + 1) return 1;
    PyGILState_STATE state = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised;
}

/* Calls of this thread that are not over: more than one where a signal's handler, which runs while one waits, makes another. */
struct within {
    struct holder *holder;
    struct within *outer;
};
static _Thread_local struct within *innermost;

/* What comes after a call of the same thread would wait for ever: that one cannot go on before the handler returns. */
static int in_its_own_way(const struct holder *h) {
    const struct within *w = innermost;
    while (w && w->holder != h) w = w->outer;
    if (w) PyErr_SetString(PyExc_RuntimeError, "a signal handler cannot wait for a collective of a group in which its thread waits already: let it set a flag, and call this afterwards");
    return w != NULL;
}

static int run(struct holder *h, const struct phx_call *call) {
    struct within own = {h, innermost};
    int result;
    innermost = &own;
    Py_BEGIN_ALLOW_THREADS
    result = phx_run(h->group, call);
    Py_END_ALLOW_THREADS
    innermost = own.outer;
    return result;
}

/* -- arguments */

static int64_t number(PyObject *o) { return PyLong_AsLongLong(o); }

static int few(const char *name, Py_ssize_t have, Py_ssize_t want) {
    if (have == want) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, want, have);
    return 1;
}

/* The end of a call: its result, or what a signal raised. */
static PyObject *answer(struct holder *h, int64_t result) {
    let_go(h);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(result);
}

/* (address, bytes, address, bytes, ...). NULL where there are none, or with an error. */
static struct phx_part *parts(PyObject *flat, int *count) {
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

/* group, kind, dtype, op, root, before, average, patience_ms, ins, outs */
struct request {
    struct holder *holder;
    struct phx_call call;
    struct phx_part *in, *out;
};

static int request(struct request *r, const char *name, PyObject *const *args, Py_ssize_t n) {
    if (few(name, n, 10)) return -1;
    struct phx_call *c = &r->call;
    c->kind = (int)number(args[1]), c->dtype = (int)number(args[2]), c->op = (int)number(args[3]);
    c->root = (int)number(args[4]), c->before = PyFloat_AsDouble(args[5]), c->average = PyObject_IsTrue(args[6]);
    c->patience = number(args[7]);
    c->in = r->in = parts(args[8], &c->ins);
    c->out = r->out = PyErr_Occurred() ? NULL : parts(args[9], &c->outs);
    if (!PyErr_Occurred() && (r->holder = hold(args[0]))) {
        const char *wrong = phx_wrong(r->holder->group, c);
        if (!wrong) return 0;
        PyErr_SetString(PyExc_ValueError, wrong);
        let_go(r->holder);
    }
    free(r->in);
    free(r->out);
    return -1;
}

/* -- coming and going */

static PyObject *py_memory(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (few("memory", n, 2)) return NULL;
    int64_t ranks = number(args[0]), slot = number(args[1]);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(phx_memory((int)ranks, (size_t)slot));
}

static PyObject *py_join(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* fd, rank, ranks, slot, pids, direct, patience_ms */
    (void)self;
    if (few("join", n, 7)) return NULL;
    int64_t fd = number(args[0]), rank = number(args[1]), ranks = number(args[2]), slot = number(args[3]), patience = number(args[6]);
    int direct = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (ranks < 1 || ranks > PHX_MOST || rank < 0 || rank >= ranks || slot < 1 || PySequence_Size(args[4]) != ranks) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "not a group: rank %d of %d (at most %d), a pid for each", (int)rank, (int)ranks, PHX_MOST);
        return NULL;
    }
    int32_t pids[PHX_MOST];
    for (int64_t r = 0; r < ranks; r++) {
        PyObject *pid = PySequence_GetItem(args[4], r);
        if (!pid) return NULL;
        pids[r] = (int32_t)number(pid);
        Py_DecRef(pid);
    }
    struct holder *h = PyErr_Occurred() ? NULL : calloc(1, sizeof *h);
    if (!h) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    int why;
    joining = atomic_load(&joinings) + 1;
    Py_BEGIN_ALLOW_THREADS
    h->group = phx_join((int)fd, (int)rank, (int)ranks, (size_t)slot, pids, direct, patience, interrupted);
    why = errno;
    Py_END_ALLOW_THREADS
    joining = 0;
    PyObject *capsule = h->group ? PyCapsule_New(h, NAME, dropped) : NULL;
    if (capsule) return capsule;
    if (h->group) phx_leave(h->group);
    free(h);
    errno = why;
    return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *py_leave(PyObject *self, PyObject *capsule) { /* whether it has ended: nobody was in a call */
    (void)self;
    struct holder *h = PyCapsule_GetPointer(capsule, NAME);
    if (!h) return NULL;
    if (!h->left) {
        h->left = 1;
        h->calls++;
        if (phx_own(h->group)) phx_depart(h->group); /* whoever is in a call returns, and the last of them ends the group */
        let_go(h);
    }
    return PyBool_FromLong(!h->group);
}

static PyObject *py_abort(PyObject *self, PyObject *capsule) {
    (void)self;
    struct holder *h = hold(capsule);
    if (!h) return NULL;
    phx_abort(h->group);
    let_go(h);
    Py_RETURN_NONE;
}

static PyObject *py_culprits(PyObject *self, PyObject *capsule) { /* [rank, ...] */
    (void)self;
    struct holder *h = hold(capsule);
    if (!h) return NULL;
    uint8_t blamed[PHX_MOST] = {0};
    phx_culprits(h->group, blamed);
    let_go(h);
    PyObject *list = PyList_New(0);
    for (int r = 0; list && r < PHX_MOST; r++) {
        if (!blamed[r]) continue;
        PyObject *rank = PyLong_FromLong(r);
        if (!rank || PyList_Append(list, rank)) {
            Py_DecRef(list);
            list = NULL;
        }
        Py_DecRef(rank);
    }
    return list;
}

static PyObject *py_said(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* kind, dtype, op, root, average, bytes, before */
    (void)self;
    if (few("said", n, 2)) return NULL;
    int64_t rank = number(args[1]);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    if (!h) return NULL;
    struct phx_said said = {0};
    phx_said(h->group, (int)rank, &said);
    let_go(h);
    return Py_BuildValue("(iiiiiKd)", said.kind, said.dtype, said.op, said.root, said.average, (unsigned long long)said.bytes, said.before);
}

static PyObject *py_direct(PyObject *self, PyObject *capsule) {
    (void)self;
    struct holder *h = hold(capsule);
    if (!h) return NULL;
    int direct = phx_direct(h->group);
    let_go(h);
    return PyBool_FromLong(direct);
}

/* -- collectives */

static PyObject *run_one(struct holder *h, const struct phx_call *call) {
    const char *wrong = phx_wrong(h->group, call);
    if (wrong) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return answer(h, 0);
    }
    return answer(h, in_its_own_way(h) ? 0 : run(h, call));
}

/* group, address, count, dtype, op, before, average, patience_ms */
static PyObject *py_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (few("all_reduce", n, 8)) return NULL;
    struct phx_part part = {PyLong_AsVoidPtr(args[1]), 0};
    struct phx_call call = {.kind = PHX_ALL_REDUCE, .outs = 1, .out = &part};
    size_t count = PyLong_AsSize_t(args[2]);
    call.dtype = (int)number(args[3]), call.op = (int)number(args[4]), call.before = PyFloat_AsDouble(args[5]);
    call.average = PyObject_IsTrue(args[6]), call.patience = number(args[7]);
    part.bytes = count * phx_itemsize(call.dtype);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    return h ? run_one(h, &call) : NULL;
}

/* group, address, bytes, dtype, root, patience_ms */
static PyObject *py_broadcast(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (few("broadcast", n, 6)) return NULL;
    struct phx_part part = {PyLong_AsVoidPtr(args[1]), PyLong_AsSize_t(args[2])};
    struct phx_call call = {.kind = PHX_BROADCAST, .before = 1.0, .outs = 1, .out = &part};
    call.dtype = (int)number(args[3]), call.root = (int)number(args[4]), call.patience = number(args[5]);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    return h ? run_one(h, &call) : NULL;
}

static PyObject *py_barrier(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, patience_ms */
    (void)self;
    if (few("barrier", n, 2)) return NULL;
    struct phx_call call = {.kind = PHX_BARRIER, .before = 1.0, .patience = number(args[1])};
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    return h ? run_one(h, &call) : NULL;
}

static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    struct request r = {0};
    if (request(&r, "run", args, n)) return NULL;
    int result = in_its_own_way(r.holder) ? 0 : run(r.holder, &r.call);
    free(r.in);
    free(r.out);
    return answer(r.holder, result);
}

static PyObject *py_start(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* a ticket */
    (void)self;
    struct request r = {0};
    if (request(&r, "start", args, n)) return NULL;
    uint64_t ticket = phx_start(r.holder->group, &r.call);
    free(r.in);
    free(r.out);
    if (!ticket) PyErr_NoMemory();
    return answer(r.holder, (int64_t)ticket);
}

static PyObject *py_done(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, ticket */
    (void)self;
    if (few("done", n, 2)) return NULL;
    int64_t ticket = number(args[1]);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    return h ? answer(h, phx_done(h->group, (uint64_t)ticket)) : NULL;
}

static PyObject *py_wait(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, ticket, ms: a phx_result, or -1 */
    (void)self;
    if (few("wait", n, 3)) return NULL;
    int64_t ticket = number(args[1]), patience = number(args[2]);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    if (!h) return NULL;
    if (!phx_done(h->group, (uint64_t)ticket) && in_its_own_way(h)) return answer(h, 0);
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = phx_wait(h->group, (uint64_t)ticket, patience);
    Py_END_ALLOW_THREADS
    return answer(h, result);
}

/* -- memory that all have mapped */

/* group, number, bytes, (address here, address there, ...) */
static PyObject *py_lend(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (few("lend", n, 4)) return NULL;
    void *here[PHX_MOST];
    uint64_t there[PHX_MOST];
    uint32_t name = (uint32_t)number(args[1]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    Py_ssize_t places = PyTuple_Size(args[3]) / 2;
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    if (!h) return NULL;
    for (Py_ssize_t r = 0; r < places && r < PHX_MOST; r++) {
        here[r] = PyLong_AsVoidPtr(PyTuple_GetItem(args[3], 2 * r));
        there[r] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[3], 2 * r + 1));
    }
    if (!PyErr_Occurred() && places != phx_ranks(h->group)) PyErr_SetString(PyExc_ValueError, "a place for each rank");
    if (!PyErr_Occurred() && phx_lend(h->group, name, bytes, here, there)) PyErr_NoMemory();
    return answer(h, 0);
}

static PyObject *py_withdraw(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, number */
    (void)self;
    if (few("withdraw", n, 2)) return NULL;
    int64_t name = number(args[1]);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    if (!h) return NULL;
    phx_withdraw(h->group, (uint32_t)name);
    return answer(h, 0);
}

/* out, inputs (addresses), count, dtype, op, before, average: no group, for whoever wants to see the arithmetic */
static PyObject *py_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (few("reduce", n, 7)) return NULL;
    const void *inputs[PHX_MOST];
    Py_ssize_t ranks = PyTuple_Size(args[1]);
    for (Py_ssize_t r = 0; r < ranks && r < PHX_MOST; r++) inputs[r] = PyLong_AsVoidPtr(PyTuple_GetItem(args[1], r));
    void *out = PyLong_AsVoidPtr(args[0]);
    size_t count = PyLong_AsSize_t(args[2]);
    int dtype = (int)number(args[3]), op = (int)number(args[4]), average = PyObject_IsTrue(args[6]);
    double before = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (ranks < 1 || ranks > PHX_MOST || !phx_reduces(dtype, op)) {
        PyErr_SetString(PyExc_ValueError, "there is no such reduction");
        return NULL;
    }
    phx_reduce(out, inputs, (int)ranks, count, dtype, op, before, average);
    Py_RETURN_NONE;
}

/* -- from rank to rank */

/* group, address, bytes, peer, tag, patience_ms */
struct parcel_args {
    struct holder *holder;
    void *at;
    size_t bytes;
    int peer;
    int64_t tag, patience;
};

static int parcel_args(struct parcel_args *a, const char *name, PyObject *const *args, Py_ssize_t n) {
    if (few(name, n, 6)) return -1;
    a->at = PyLong_AsVoidPtr(args[1]), a->bytes = PyLong_AsSize_t(args[2]), a->peer = (int)number(args[3]);
    a->tag = number(args[4]), a->patience = number(args[5]);
    a->holder = PyErr_Occurred() ? NULL : hold(args[0]);
    return a->holder ? 0 : -1;
}

static PyObject *ticket_of(struct holder *h, uint64_t ticket) {
    if (!ticket) PyErr_SetString(PyExc_ValueError, "there is no such rank in the group, or no memory");
    return answer(h, (int64_t)ticket);
}

static PyObject *py_send(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* a ticket */
    (void)self;
    struct parcel_args a;
    if (parcel_args(&a, "send", args, n)) return NULL;
    return ticket_of(a.holder, phx_send(a.holder->group, a.at, a.bytes, a.peer, a.tag, a.patience));
}

static PyObject *py_recv(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* a ticket */
    (void)self;
    struct parcel_args a;
    if (parcel_args(&a, "recv", args, n)) return NULL;
    uint64_t ticket;
    Py_BEGIN_ALLOW_THREADS /* may read what has come already */
    ticket = phx_recv(a.holder->group, a.at, a.bytes, a.peer, a.tag, a.patience);
    Py_END_ALLOW_THREADS
    return ticket_of(a.holder, ticket);
}

static PyObject *py_parcel_done(PyObject *self, PyObject *const *args, Py_ssize_t n) { /* group, ticket */
    (void)self;
    if (few("parcel_done", n, 2)) return NULL;
    int64_t ticket = number(args[1]);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    return h ? answer(h, phx_parcel_done(h->group, (uint64_t)ticket)) : NULL;
}

/* group, ticket, ms: a phx_result or -1, a rank, bytes */
static PyObject *py_parcel_wait(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (few("parcel_wait", n, 3)) return NULL;
    int64_t ticket = number(args[1]), patience = number(args[2]);
    struct holder *h = PyErr_Occurred() ? NULL : hold(args[0]);
    if (!h) return NULL;
    int result, from;
    size_t bytes;
    Py_BEGIN_ALLOW_THREADS
    result = phx_parcel_wait(h->group, (uint64_t)ticket, patience, &from, &bytes);
    Py_END_ALLOW_THREADS
    let_go(h);
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
    ONE("culprits", py_culprits),
    FAST("said", py_said),
    ONE("direct", py_direct),
    FAST("all_reduce", py_all_reduce),
    FAST("broadcast", py_broadcast),
    FAST("barrier", py_barrier),
    FAST("run", py_run),
    FAST("start", py_start),
    FAST("done", py_done),
    FAST("wait", py_wait),
    FAST("lend", py_lend),
    FAST("withdraw", py_withdraw),
    FAST("reduce", py_reduce),
    FAST("send", py_send),
    FAST("recv", py_recv),
    FAST("parcel_done", py_parcel_done),
    FAST("parcel_wait", py_parcel_wait),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
