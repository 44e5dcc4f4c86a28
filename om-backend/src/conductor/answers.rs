//! What is said to those who ask.

use super::{Conductor, Question};
use crate::northbound::view::{EmView, EndView, FunctionView, Inspect, Status};
use crate::supervisor::Supervised;
use crate::wiring::{Destination, EndState};
use std::sync::atomic::Ordering;

impl Conductor {
    pub(super) fn answer(&mut self, question: Question) {
        // Whoever asked may have gone.
        match question {
            Question::Status(answer) => drop(answer.send(self.status())),
            Question::Functions(answer) => drop(answer.send(self.function_views())),
            Question::Inspect(answer) => drop(answer.send(self.inspect())),
            Question::Connections(answer) => {
                let up = |e: &Supervised| Some((e.name.clone(), e.session.as_ref()?.fabric()));
                drop(answer.send(self.ems.iter().filter_map(up).collect()));
            }
            Question::Upgrade {
                em,
                program,
                answer,
            } => self.upgrade(&em, program, answer),
            Question::SetLink {
                function,
                up,
                answer,
            } => {
                let found = self.functions.iter().find(|f| f.config.name == function);
                let result = match found {
                    Some(f) => {
                        f.admin_up.store(up, Ordering::Release);
                        let orders = self.subnet.set_link(f.id(), up);
                        self.give_rdma(orders);
                        self.update_links();
                        Ok(())
                    }
                    None => Err(format!(
                        "there is no function \"{function}\"; there are {}",
                        self.function_names().join(", ")
                    )),
                };
                drop(answer.send(result));
            }
        }
    }

    pub(super) fn function_names(&self) -> Vec<String> {
        let names = self.functions.iter();
        names.map(|f| f.config.name.clone()).collect()
    }

    pub(super) fn name_of(&self, function: u32) -> String {
        self.functions
            .get(function as usize)
            .map(|f| f.config.name.clone())
            .unwrap_or_default()
    }

    pub(super) fn status(&self) -> Status {
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            run_dir: self.places.run_dir.to_string_lossy().into_owned(),
            ems: self
                .ems
                .iter()
                .map(|e| EmView {
                    name: e.name.clone(),
                    state: e.state().to_owned(),
                    pid: e.pid(),
                    managed: e.managed,
                    remote: e.remote,
                    address: e.address().map(|address| address.to_string()),
                    restarts: e.restarts,
                    since_s: e.since.elapsed().as_secs_f64(),
                    reason: e.reason.clone(),
                    functions: e.functions.iter().map(|id| self.name_of(*id)).collect(),
                })
                .collect(),
        }
    }

    pub(super) fn function_views(&self) -> Vec<FunctionView> {
        self.functions
            .iter()
            .map(|f| {
                let em = self.ems.get(f.em).map(|e| e.name.clone());
                let (em, id) = (em.unwrap_or_default(), f.id());
                FunctionView::new(f, em, self.wiring.carrier(id), self.rdma_view(id))
            })
            .collect()
    }

    pub(super) fn inspect(&self) -> Inspect {
        Inspect {
            status: self.status(),
            functions: self.function_views(),
            presentation: self
                .functions
                .iter()
                .map(|f| (f.config.name.clone(), f.control.inspect(&f.spec)))
                .collect(),
            wires: self
                .wiring
                .ends()
                .iter()
                .map(|(id, end)| EndView {
                    id: *id,
                    function: self.name_of(end.function),
                    to: match end.to {
                        Destination::Function { function, .. } => self.name_of(function),
                        Destination::Port => "port".to_owned(),
                        Destination::Capture => "capture".to_owned(),
                    },
                    state: match &end.state {
                        EndState::Pending => "pending".to_owned(),
                        EndState::Attached => "attached".to_owned(),
                        EndState::Failed(reason) => format!("failed: {reason}"),
                    },
                })
                .collect(),
        }
    }
}
