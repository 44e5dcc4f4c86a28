//! Another program for a running EM. What its guests had goes over as after a crash; a program that cannot take it
//! over is refused before anything stops, and one that does not do what it said gives way to the one before.

use super::Conductor;
use crate::supervisor::Upgrade;
use crate::supervisor::program::Program;
use m2m_fabric::proto::VERSION;
use std::sync::mpsc::SyncSender;

impl Conductor {
    pub(super) fn upgrade(
        &mut self,
        name: &str,
        program: Program,
        answer: SyncSender<Result<(), String>>,
    ) {
        let em = match self.may_upgrade(name, &program) {
            Ok(em) => em,
            Err(reason) => return drop(answer.send(Err(reason))),
        };
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        let reason = format!("gives way to {}", program.path.display());
        log::info!("EM {name} {reason}");
        e.upgrade = Some(Upgrade {
            former: e.program.replace(program.path),
            started: false,
            left: e.functions.len(),
            answer,
        });
        e.kill(reason.clone());
        self.lost(em, &reason);
    }

    fn may_upgrade(&self, name: &str, program: &Program) -> Result<usize, String> {
        let path = program.path.display();
        let found = self.ems.iter().position(|e| e.name == name);
        let Some((em, e)) = found.and_then(|em| Some((em, self.ems.get(em)?))) else {
            let names: Vec<_> = self.ems.iter().map(|e| e.name.as_str()).collect();
            let names = names.join(", ");
            return Err(format!("there is no EM \"{name}\"; there are {names}"));
        };
        if !e.managed {
            return Err(format!("the OM does not start EM \"{name}\" itself"));
        }
        if e.session.is_none() || e.upgrade.is_some() {
            return Err(format!("EM \"{name}\" is not up but {}", e.state()));
        }
        let (theirs, known) = (program.formats.m2m, &program.formats.state);
        if theirs != VERSION {
            return Err(format!(
                "{path} speaks version {theirs} of M2M, this OM version {VERSION}"
            ));
        }
        for function in e
            .functions
            .iter()
            .filter_map(|id| self.functions.get(*id as usize))
        {
            let version = function.vault.state_version();
            if let Some(version) = version.filter(|version| !known.contains(version)) {
                let function = &function.config.name;
                return Err(format!(
                    "{path} cannot go on with {function}, whose state has layout version {version}; it knows {known:?}"
                ));
            }
        }
        Ok(em)
    }

    /// A function of an EM moves frames.
    pub(super) fn upgrade_goes_on(&mut self, em: usize) {
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        let Some(upgrade) = &mut e.upgrade else {
            return;
        };
        upgrade.left = upgrade.left.saturating_sub(1);
        if upgrade.left == 0 {
            log::info!("EM {} goes on", e.name);
            // Whoever asked may have gone.
            let _ = upgrade.answer.send(Ok(()));
            e.upgrade = None;
        }
    }

    /// A program that is tried does not take over what it should.
    pub(super) fn upgrade_useless(&mut self, em: usize, reason: &str) {
        if let Some(e) = self.ems.get_mut(em) {
            if e.upgrade.is_some() {
                e.kill(reason.to_owned());
                self.lost(em, reason);
            }
        }
    }

    /// A program that was tried ended, or never began.
    pub(super) fn upgrade_failed(&mut self, em: usize, reason: &str) {
        let Some(e) = self.ems.get_mut(em) else {
            return;
        };
        let Some(upgrade) = e.upgrade.take() else {
            return;
        };
        e.program = upgrade.former;
        let program = e.program.as_ref().unwrap_or(&self.places.em_binary);
        let back = format!("back to {}", program.display());
        log::error!("EM {}: {back}, because the other program {reason}", e.name);
        let sentence = format!("EM \"{}\" is {back}: the other {reason}", e.name);
        let _ = upgrade.answer.send(Err(sentence));
    }
}
