// River. Settings and reasons: ../README.md
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

var text = strings.Repeat("x", 170)

type args struct {
	Number int    `json:"number"`
	Text   string `json:"text"`
}

func (args) Kind() string { return "noop" }

type worker struct {
	river.WorkerDefaults[args]
	handled *atomic.Int64
	started *sync.Map
}

func (w *worker) Work(_ context.Context, job *river.Job[args]) error {
	w.started.LoadOrStore(job.Args.Number, time.Now())
	w.handled.Add(1)
	return nil
}

// The drain counts only.
type counter struct {
	river.WorkerDefaults[args]
	handled *atomic.Int64
}

func (w *counter) Work(context.Context, *river.Job[args]) error {
	w.handled.Add(1)
	return nil
}

func cpu() time.Duration {
	var usage syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

type clock struct {
	cpu   time.Duration
	began time.Time
}

func start() clock { return clock{cpu(), time.Now()} }

func (c clock) done(more map[string]any) {
	out := map[string]any{"seconds": time.Since(c.began).Seconds(), "client_seconds": (cpu() - c.cpu).Seconds()}
	for key, value := range more {
		out[key] = value
	}
	line, err := json.Marshal(out)
	check(err)
	fmt.Println(string(line))
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func ready() {
	fmt.Println("ready")
	_, err := bufio.NewReader(os.Stdin).ReadString('\n')
	check(err)
}

func batch(first, count int) []river.InsertManyParams {
	jobs := make([]river.InsertManyParams, count)
	for n := range jobs {
		jobs[n] = river.InsertManyParams{Args: args{first + n, text}}
	}
	return jobs
}

func main() {
	ctx := context.Background()
	command, dsn, count := os.Args[1], os.Args[2], 0
	if len(os.Args) > 3 {
		var err error
		count, err = strconv.Atoi(os.Args[3])
		check(err)
	}
	config, err := pgxpool.ParseConfig(dsn)
	check(err)
	if command == "enqueue" || command == "bulk" {
		config.MaxConns = 1
	} else {
		config.MaxConns = 10
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	check(err)
	defer pool.Close()
	driver := riverpgxv5.New(pool)
	handled, started := &atomic.Int64{}, &sync.Map{}
	workers := river.NewWorkers()
	if command == "latency" {
		river.AddWorker(workers, &worker{handled: handled, started: started})
	} else {
		river.AddWorker(workers, &counter{handled: handled})
	}
	client, err := river.NewClient(driver, &river.Config{
		FetchCooldown:     time.Millisecond,
		FetchPollInterval: 100 * time.Millisecond,
		Logger:            slog.New(slog.NewTextHandler(io.Discard, nil)),
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1000}},
		Workers:           workers,
	})
	check(err)
	switch command {
	case "install":
		migrator, err := rivermigrate.New(driver, nil)
		check(err)
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		check(err)
	case "seed":
		for first := 0; first < count; first += 1000 {
			_, err := client.InsertManyFast(ctx, batch(first, min(1000, count-first)))
			check(err)
		}
	case "drain":
		ready()
		clock := start()
		check(client.Start(ctx))
		for handled.Load() < int64(count) {
			time.Sleep(4 * time.Millisecond)
		}
		for done := false; !done; time.Sleep(4 * time.Millisecond) {
			query := "SELECT NOT EXISTS (SELECT FROM river_job WHERE state <> 'completed')"
			check(pool.QueryRow(ctx, query).Scan(&done))
		}
		clock.done(nil)
	case "enqueue":
		ready()
		clock := start()
		for n := range count {
			_, err := client.Insert(ctx, args{n, text}, nil)
			check(err)
		}
		clock.done(nil)
	case "bulk":
		ready()
		clock := start()
		for first := 0; first < count; first += 1000 {
			_, err := client.InsertManyFast(ctx, batch(first, 1000))
			check(err)
		}
		clock.done(nil)
	case "latency":
		check(client.Start(ctx))
		time.Sleep(500 * time.Millisecond)
		ready()
		clock := start()
		seconds, err := strconv.Atoi(os.Args[4])
		check(err)
		begin, jobs := time.Now(), count*seconds
		committed := make([]time.Time, jobs)
		for n := range jobs {
			time.Sleep(time.Until(begin.Add(time.Duration(n) * time.Second / time.Duration(count))))
			_, err := client.Insert(ctx, args{n, text}, nil)
			check(err)
			committed[n] = time.Now()
		}
		for handled.Load() < int64(jobs) {
			time.Sleep(4 * time.Millisecond)
		}
		waits := []float64{}
		for n := count; n < jobs; n++ {
			at, _ := started.Load(n)
			waits = append(waits, max(0, at.(time.Time).Sub(committed[n]).Seconds()*1000))
		}
		sort.Float64s(waits)
		clock.done(map[string]any{"p50_ms": waits[len(waits)/2], "p99_ms": waits[len(waits)*99/100], "jobs": jobs})
	default:
		panic("unknown command " + command)
	}
	os.Stdout.Sync()
	os.Exit(0)
}
